"""Step 6: what an exchange is. Which collectives, in which order: straight-line code that reads like the paper."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from gradwire.bucket import Bucket
from gradwire.comm import Comm


@runtime_checkable
class Exchange(Protocol):
    """Averages a bucket over the ranks, in place.

    Implementations are frozen dataclasses that inherit from nothing; `str()` of one is the spec that makes it.
    """

    @property
    def lanes(self) -> int:
        """The largest number of collectives `mean_` issues; 0 if it never communicates."""

    @property
    def takes_residual(self) -> bool:
        """Whether `mean_` wants the error feedback of the bucket."""

    @property
    def align(self) -> int:
        """Chunks are cut at multiples of (ranks x align) values; 0: only between tensors."""

    def chunk_bytes(self, size: int) -> int:
        """How much gradient travels at a time on `size` ranks: little enough to overlap, enough to be worth it."""

    def bound(self, size: int) -> float | None:
        """A promise: `|result - mean| <= bound * rms_i |x_i|` (2-norms, over `size` ranks); None if there is none.

        It holds for what a step emits without feedback, and for finite values in the normal range of the wire.
        """

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Replace `bucket.flat` by the mean over the ranks, the same bits on all of them.

        With `residual` (float32, undivided gradients) it is added first, and then holds what was lost.
        """
