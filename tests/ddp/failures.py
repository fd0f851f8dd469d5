"""What goes wrong on one rank must not leave the others waiting."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire import Bucket
from gradwire.exchanges import Exact
from gradwire.exchanges.base import Comm

from . import models
from .kit import UNEVEN, Ranks, check
from .models import batch, seeded
from .trial import raised, train


@dataclass(slots=True)
class Failing:
    """`exact`, until something happens to one rank."""

    rank: int
    at: int
    """The job, counted from 1."""
    lanes: int = 1
    takes_residual: bool = False
    align: int = 1
    jobs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def chunk_bytes(self, size: int) -> int:
        return 1 << 20

    def bound(self, size: int) -> float:
        return Exact().bound(size)

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        if next(self.jobs) == self.at and comm.rank == self.rank:
            self.fail(comm)
        Exact().mean_(bucket, comm)

    def fail(self, comm: Comm) -> None:
        raise ValueError("boom")

    def __str__(self) -> str:
        return "failing"


def run_into(ranks: Ranks, exchange: Failing, steps: int, **ddp: float) -> str:
    """Train until backward raises; the text. The others must not have had to wait for their time limit."""
    model = ranks.wrap(seeded(models.Deep, 6), **ddp)
    hook = ranks.register(model, exchange)
    text = raised(RuntimeError, lambda: train(model, (batch(ranks.rank, step) for step in range(steps))))
    hook.close()
    assert "Timed out" not in text, text
    return text


def check_texts(ranks: Ranks, text: str, guilty: int) -> None:
    assert "ValueError" in text, text
    assert "boom" in text, text
    if ranks.rank != guilty:
        assert f"rank {guilty}" in text, text
        assert "another rank failed" in text, text


@check(sizes=(2, 3, 4), specs=("exact",))
def an_exchange_that_raises_on_rank_1(ranks: Ranks) -> None:
    """At step 3; there is one bucket, so job 3."""
    check_texts(ranks, run_into(ranks, Failing(1, at=3), steps=5), guilty=1)


@check(sizes=UNEVEN, specs=("exact",))
def an_exchange_that_raises_on_rank_0_amid_other_buckets(ranks: Ranks) -> None:
    check_texts(ranks, run_into(ranks, Failing(0, at=5), steps=5, bucket_cap_mb=0.002), guilty=0)


@check(sizes=UNEVEN, specs=("exact",))
def training_on_after_a_failure(ranks: Ranks) -> None:
    """The model is not lost: in a new DDP it goes on."""
    model = ranks.wrap(seeded(models.Deep, 3))
    ranks.register(model, Failing(1, at=2))
    raised(RuntimeError, lambda: train(model, (batch(ranks.rank, step) for step in range(3))))
    again = ranks.wrap(model.module)
    hook = ranks.register(again, "exact")
    train(again, (batch(ranks.rank, step) for step in range(3)))
    assert hook.steps == 3


class Greedy(Failing):
    """Issues more collectives than it declares."""

    def fail(self, comm: Comm) -> None:
        comm.all_reduce_(torch.zeros(1))


@check(specs=("exact",))
def more_collectives_than_lanes(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 3))
    ranks.register(model, Greedy(ranks.rank, at=2))
    text = raised(RuntimeError, lambda: train(model, (batch(ranks.rank, step) for step in range(3))))
    assert "issued collective 2 but declares lanes=1" in text
