"""Tests that run on ranks: `on_ranks` makes a test of a function, and runs it on every rank of a pool of processes.

    @on_ranks(2, 4, specs=MAIN)
    def test_something(ranks: Ranks) -> None:
        model = ranks.wrap(nn.Linear(2, 2))
        ranks.register(model)
        ...

A pool of each size is started when a test needs it and kept for the session, so that a test costs milliseconds. If a
rank fails, the test fails with the tracebacks of all ranks that did, and the next test gets new processes.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.exchanges import EXCHANGES, Exchange
from gradwire.testing import RankFailed, RankPool
from gradwire.testing.processes import GRACE_S, when_all_returned

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
"""Every sequence of collectives, on every number of ranks."""
SPECS = (*MAIN, *(name for name in EXCHANGES if name not in (*MAIN, "powersgd")))
"""All exchanges. Those that are not in MAIN differ in their codec alone, and run on 2 ranks. (At its default rank
powersgd would warn that the small models here do not shrink.)"""
AVERAGING = tuple(spec for spec in MAIN if gradwire.exchange(spec).lanes)
FEEDBACK = tuple(spec for spec in MAIN if gradwire.exchange(spec).takes_residual)
QUICK = ("exact", "noop", "bf16", "int8", "fp16:feedback=true", "powersgd:rank=1,min_compression=0.5")
"""The specs of SPECS that are not left to `thorough`: the exchanges' own tests cover each of the others."""
QUICK_ON_MORE = ("exact", "int8", "powersgd:rank=1,min_compression=0.5")
"""The same on more than 2 ranks, where the contracts of exchanges cover the others."""

GROUP_TIMEOUT_S = 240.0
"""A collective that hangs fails after this time. One that works takes a small fraction of a second."""
TEST_TIMEOUT_S = 300.0
"""A test that hangs in another way ends after this time, before pytest's own time limit ends all tests."""


@dataclass(slots=True)
class Ranks:
    """The ranks of one test, as one of them sees them."""

    rank: int
    size: int
    spec: str
    """The exchange under test."""
    group: dist.ProcessGroup
    """All ranks, but not the default group."""
    folder: Path
    """The same for all ranks, and empty."""
    hooks: list[gradwire.Hook] = field(default_factory=list)

    @property
    def exchange(self) -> Exchange:
        return gradwire.exchange(self.spec)

    def wrap(self, module: nn.Module, **options: Any) -> DDP:
        options.setdefault("process_group", self.group)
        return DDP(module, **options)

    def register(self, model: DDP, spec: str | Exchange | None = None, **options: Any) -> gradwire.Hook:
        """Register the spec under test; the hook is closed when the test ends."""
        hook = gradwire.register(model, spec or self.spec, **options)
        self.hooks.append(hook)
        return hook

    def new_group(self, members: Sequence[int]) -> dist.ProcessGroup:
        """A sub-group. All ranks must call this, members or not."""
        return new_group(members)

    def close(self) -> None:
        """Close the hooks that the test registered."""
        while self.hooks:
            self.hooks.pop().close()

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks of a failure on the lanes of the hooks; elsewhere they have to time out."""
        for hook in self.hooks:
            with suppress(Exception):
                hook.runner.lanes.break_(error)

    def sum_(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        dist.all_reduce(tensor, group=group or self.group)
        return tensor


def new_group(members: Sequence[int]) -> dist.ProcessGroup:
    return dist.new_group(list(members), timeout=timedelta(seconds=GROUP_TIMEOUT_S))


Body = Callable[[Ranks], None]


def on_ranks(
    *sizes: int, thorough: Collection[int] = (), specs: Sequence[str] = (), timeout_s: float = TEST_TIMEOUT_S
) -> Callable[[Body], Any]:
    """Make a test of a function: it runs on every rank of each of these numbers of ranks, for each of the specs.

    On the numbers of ranks in `thorough` it runs in `make test-all` only, and so do the specs that are not in QUICK, or
    on more than 2 ranks not in QUICK_ON_MORE.
    """

    return lambda body: as_test(body, list(_cases(sizes, specs, thorough)), pool, run_body, timeout_s)


def as_test(
    body: Body, cases: Sequence[Any], pool: Callable[[int], RankPool], run: Callable[..., None], timeout_s: float
) -> Any:
    """The test that runs `run`, which runs `body`, on the ranks of a pool, for each (size, spec) of `cases`."""

    def test(size: int, spec: str, tmp_path: Path) -> None:
        __tracebackhide__ = True
        failure = ""
        try:
            pool(size).run(run, body.__module__, body.__name__, spec, tmp_path, timeout_s=timeout_s)
        except RankFailed as error:
            failure = str(error)
        if failure:  # outside of the handler, which would show every traceback twice
            pytest.fail(failure, pytrace=False)

    test.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]  # of pytest's arguments, not of body's
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(test, name, getattr(body, name))
    test.__wrapped__ = body  # type: ignore[attr-defined]  # where pytest says that the test is
    test = pytest.mark.timeout(timeout_s + 2 * GRACE_S)(test)
    return pytest.mark.parametrize(("size", "spec"), list(cases))(test)


def _cases(sizes: Sequence[int], specs: Sequence[str], thorough: Collection[int]) -> Iterator[Any]:
    for size in sorted({*sizes, *thorough}):
        for spec in specs or ("",):
            if size == 2 or spec not in SPECS or _runs_everywhere(spec):
                quick = QUICK if size <= 2 else QUICK_ON_MORE
                long = size in thorough or (spec in SPECS and spec not in quick)
                name = f"{size}-{spec}" if spec else str(size)
                yield pytest.param(size, spec, id=name, marks=pytest.mark.thorough if long else ())


def _runs_everywhere(spec: str) -> bool:
    """Beyond 2 ranks `bf16:shots=two` is the same as bf16."""
    return spec in MAIN and spec != "bf16:shots=two"


def run_body(rank: int, size: int, module: str, name: str, spec: str, folder: Path) -> None:
    """Run the body of a test on one rank."""
    body = getattr(importlib.import_module(module), name).__wrapped__
    ranks = Ranks(rank, size, spec, new_group(range(size)), folder)
    when_all_returned(ranks.close)
    warnings.filterwarnings("error", module=r"(gradwire|tests)\b")
    try:
        body(ranks)
    except BaseException as error:
        ranks.give_up(error)
        raise


_pools: dict[tuple[int, bool], RankPool] = {}


def pool(size: int, *, test_device: bool = False) -> RankPool:
    """The session's processes of this number of ranks."""
    return _pools.setdefault((size, test_device), RankPool(size, test_device=test_device))


def close_pools() -> None:
    for each in _pools.values():
        each.close()
