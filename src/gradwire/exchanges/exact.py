"""The exchanges that encode nothing: `exact`, the backend's own sum, and `noop`, which sends nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.exchanges.base import Comm, Exchange
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.reference import Reference, backend_mean
from gradwire.kernels.memory import empty


def all_reduce_(flat: Tensor, comm: Comm, wire_dtype: torch.dtype | None = None) -> None:
    """Divide, then sum: a sum of undivided half-precision values could overflow where the mean does not."""
    flat.div_(comm.size)
    if wire_dtype is None or wire_dtype == flat.dtype:
        comm.all_reduce_(flat)
        return
    wire = empty(flat.shape, wire_dtype, flat.device).copy_(flat)
    flat.copy_(comm.all_reduce_(wire))


def exact_mean_(flat: Tensor, comm: Comm, residual: Tensor | None) -> None:
    """The mean including the whole residual, which then holds only what 16-bit gradients cannot represent."""
    if residual is None:
        all_reduce_(flat, comm)
        return
    total = flat + residual
    left = total - flat.copy_(total)
    all_reduce_(flat, comm)
    residual.copy_(torch.where(torch.isfinite(flat).all(), left, residual))


@dataclass(frozen=True, slots=True)
class Exact(Exchange):
    """The mean in the gradients' own type, like DDP without a hook."""

    name: ClassVar[str] = "exact"
    traceable = True
    buckets = 4
    """Fewer than the default: there is no encoding to hide, and on a fast link eight buckets cost 3% more than four."""

    def chunk_bytes(self, size: int) -> int:
        """Large: nothing is encoded, and the backend overlaps the parts of a ring by itself."""
        return 8 << 20

    def bound(self, size: int) -> float:
        """The rounding of `size` float32 additions."""
        return size * 2.0**-23

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Divide by the number of ranks, then all-reduce."""
        all_reduce_(bucket.flat, comm)

    def reference(self, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None = None) -> Reference:
        """Up to the order of the sum, in which each addition rounds once."""
        return backend_mean([bucket.flat for bucket in buckets], buckets[0].flat.dtype)


@dataclass(frozen=True, slots=True)
class Noop(Exchange):
    """Leaves every rank its own, undivided gradient: the upper limit of what any hook can gain.

    It is for measuring, not for training: the replicas drift apart.
    """

    name: ClassVar[str] = "noop"
    averages = False
    lanes = 0
    traceable = True

    def bound(self, size: int) -> None:
        """None, as it does not average."""
        return

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Leave the bucket alone."""
