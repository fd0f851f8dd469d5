"""Golden states: what every stateful hook and wrapper has saved in each version of its format, kept for ever.

`python -m tests.kit.golden 2` writes those of the present code into tests/golden, as version 2. Do it once, when the
format changes, and never write a file again that is there already: it stands for the checkpoints of users.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.optim import DiLoCo, LocalSGD
from gradwire.testing import RankPool

from . import sharded
from .models import Deep, batch, seeded
from .ranks import GROUP_TIMEOUT_S, Ranks, new_group

FOLDER = Path(__file__).parents[1] / "golden"
STEPS = 3
RANKS = 2


def small() -> nn.Module:
    return seeded(Deep, 2, 8)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step, 8)).square().mean().backward()
        optimizer.step()


class Kept:
    """A hook or a wrapper on a small model, on one rank: all that the tests use of it."""

    def __init__(self, subject: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.subject, self.model, self.optimizer = subject, model, optimizer

    def close(self) -> None:
        self.subject.close()


def _ddp(spec: str) -> Callable[[Ranks], Kept]:
    def make(ranks: Ranks) -> Kept:
        model = DDP(small(), process_group=ranks.group)
        return Kept(gradwire.register(model, spec), model, torch.optim.SGD(model.parameters(), lr=0.01))

    return make


def _local(kind: type[LocalSGD], **options: Any) -> Callable[[Ranks], Kept]:
    def make(ranks: Ranks) -> Kept:
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Kept(kind(model, optimizer, process_group=ranks.group, **options), model, optimizer)

    return make


def _fsdp(ranks: Ranks) -> Kept:
    model = sharded.shard(small(), sharded.mesh_of(ranks))
    hook = gradwire.register(model, "int4:feedback=true,exempt=none")
    return Kept(hook, model, torch.optim.SGD(model.parameters(), lr=0.01))


STATEFUL: dict[str, Callable[[Ranks], Kept]] = {
    "int4": _ddp("int4:feedback=true,exempt=none"),
    "sign": _ddp("sign:feedback=true,exempt=none"),
    "topk": _ddp("topk:exempt=none"),
    "powersgd": _ddp("powersgd:rank=1,min_compression=0.5"),
    "powersgd_one": _ddp("powersgd:rank=1,min_compression=0.5,sides=one"),
    "local_sgd": _local(LocalSGD, sync_every=2, exchange="int4:feedback=true,exempt=none"),
    "diloco": _local(DiLoCo, sync_every=3, exchange="bf16"),
    "fsdp": _fsdp,
}
"""Everything whose state_dict() is not empty. DiLoCo saves an average in flight."""


def path(name: str, version: int) -> Path:
    return FOLDER / f"{name}-{version}.pt"


def save(rank: int, size: int, version: int) -> None:
    """Write the files that are missing: the states of both ranks, the merged one, and their parameters."""
    for name, make in STATEFUL.items():
        kept = make(Ranks(rank, size, "", new_group(range(size)), FOLDER))
        if isinstance(kept.subject, LocalSGD):
            kept.subject.__enter__()
        train(kept.model, kept.optimizer, rank)
        own: list[Any] = [None] * size
        dist.all_gather_object(own, kept.subject.state_dict())
        merged = kept.subject.state_dict(merged=True)
        if rank == 0 and not path(name, version).exists():
            torch.save({"ranks": own, "merged": merged}, path(name, version))
        kept.close()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    ranks = RankPool(RANKS)
    ranks.run(save, int(sys.argv[1]), timeout_s=GROUP_TIMEOUT_S)
    ranks.close()
