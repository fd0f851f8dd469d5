"""No exchange at all: the upper limit of what any hook can gain. Replicas drift apart by design."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.bucket import Bucket
from gradwire.comm import Comm


@dataclass(frozen=True, slots=True)
class Noop:
    """Leaves every rank its own, undivided gradient. For measuring, not for training."""

    lanes = 0
    takes_residual = False
    align = 1

    def chunk_bytes(self, size: int) -> int:
        """Nothing travels."""
        return 1 << 30

    def bound(self, size: int) -> None:
        """None: it does not average."""
        return None

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Nothing."""

    def __str__(self) -> str:
        return "noop"
