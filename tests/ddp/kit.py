"""What the checks are made of: a registry of checks, the ranks they run on, and a model whose every step is compared.

Starting a process costs seconds, a check milliseconds. So one set of processes per number of ranks runs all checks,
and sends back one text per check: empty, or a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.exchanges import EXCHANGES, Exchange

ALL_SIZES = (1, 2, 3, 4)
SIZES = (2,)
"""Where a check runs if nothing else is said; where the number of ranks makes no difference."""
UNEVEN = (2, 3)
"""One-shot, and two-shot with shards that do not come out even."""
MAIN = (
    "exact",
    "noop",
    "fp16",
    "bf16",
    "fp16:accumulate=wire",
    "bf16:shots=two",
    "fp16:feedback=true",
    "int8",
    "int4:exempt=none",
    "int2:feedback=true,exempt=none",
    "powersgd:rank=1,min_compression=0.5",
)
"""Every way over the wire, on every number of ranks."""
SPECS = (*MAIN, *(name for name in EXCHANGES if name not in (*MAIN, "powersgd")))
"""All there are; the ones that are not in MAIN differ in their codec alone, and run on 2 ranks. (At its default rank
powersgd would say that the small models here are not worth it.)"""
AVERAGING = tuple(spec for spec in MAIN if gradwire.exchange(spec).lanes)
FEEDBACK = tuple(spec for spec in MAIN if gradwire.exchange(spec).takes_residual)

GROUP_TIMEOUT_S = 30.0
"""After this long a check that hangs fails. A check that works takes a small fraction of a second."""


@dataclass(slots=True)
class Ranks:
    """One check, as one rank sees it."""

    rank: int
    size: int
    spec: str
    group: dist.ProcessGroup
    folder: Path
    hooks: list[gradwire.Hook] = field(default_factory=list)

    @property
    def exchange(self) -> Exchange:
        return gradwire.exchange(self.spec)

    def wrap(self, module: nn.Module, **options: Any) -> DDP:
        options.setdefault("process_group", self.group)
        return DDP(module, **options)

    def register(self, model: DDP, spec: str | Exchange | None = None, **options: Any) -> gradwire.Hook:
        """Register the spec under test; closed when the check ends."""
        hook = gradwire.register(model, spec or self.spec, **options)
        self.hooks.append(hook)
        return hook

    def new_group(self, members: Sequence[int]) -> dist.ProcessGroup:
        """A sub-group. All ranks together, members or not."""
        return dist.new_group(list(members), timeout=timedelta(seconds=GROUP_TIMEOUT_S))

    def close(self) -> None:
        """What a check made and did not close."""
        while self.hooks:
            self.hooks.pop().close()

    def sum_(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        dist.all_reduce(tensor, group=group or self.group)
        return tensor


@dataclass(frozen=True, slots=True)
class Check:
    """A function of `Ranks`, and where it runs."""

    family: str
    name: str
    run: Callable[[Ranks], None]
    sizes: tuple[int, ...]
    specs: tuple[str, ...]


CHECKS: dict[str, Check] = {}


def check(
    *, sizes: Iterable[int] = SIZES, specs: Iterable[str] = MAIN
) -> Callable[[Callable[[Ranks], None]], Callable[[Ranks], None]]:
    """Add a function to the checks of its module's family."""

    def add(run: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
        made = Check(run.__module__.rpartition(".")[2], run.__name__, run, tuple(sizes), tuple(specs))
        assert CHECKS.setdefault(f"{made.family}.{made.name}", made) is made, f"{made.name} is there twice"
        return run

    return add
