"""All-reduce: the backend sums, in the gradient's own type (`exact`) or in half precision (`accumulate=wire`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.bucket import Bucket
from gradwire.comm import Comm
from gradwire.scratch import empty


def all_reduce_(flat: Tensor, comm: Comm, wire_dtype: torch.dtype | None = None) -> None:
    """Divide, then sum: a sum of undivided half-precision values could overflow where the mean does not."""
    flat.div_(comm.size)
    if wire_dtype is None or wire_dtype == flat.dtype:
        comm.all_reduce_(flat)
        return
    wire = empty(flat.shape, wire_dtype, flat.device).copy_(flat)
    flat.copy_(comm.all_reduce_(wire))


def exact_mean_(flat: Tensor, comm: Comm, residual: Tensor | None) -> None:
    """The mean, and all that is owed, but for what 16 bits cannot hold."""
    if residual is None:
        all_reduce_(flat, comm)
        return
    total = flat + residual
    left = total - flat.copy_(total)
    all_reduce_(flat, comm)
    residual.copy_(torch.where(torch.isfinite(flat).all(), left, residual))


@dataclass(frozen=True, slots=True)
class Exact:
    """The mean in the gradient's own type, like DDP without a hook."""

    lanes = 1
    takes_residual = False
    align = 1
    buckets = 4
    """Fewer than others: without any work to hide, eight cost 3% more than they gain where the link is fast."""

    def chunk_bytes(self, size: int) -> int:
        """Large: nothing is encoded, and the backend overlaps the parts of a ring by itself."""
        return 8 << 20

    def bound(self, size: int) -> float:
        """Rounding of `size` float32 additions."""
        return size * 2.0**-23

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """1. Divide by the number of ranks.  2. All-reduce."""
        all_reduce_(bucket.flat, comm)

    def __str__(self) -> str:
        return "exact"
