"""An exchange that is `exact` until something happens to one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from gradwire import Bucket
from gradwire.exchanges import Exact, Exchange
from gradwire.exchanges.base import Comm


@dataclass(slots=True)
class Failing(Exchange):
    """Fails on one rank, in the job with this number, counted from 1."""

    rank: int
    at: int
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
