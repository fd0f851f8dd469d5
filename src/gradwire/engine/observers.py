"""Observers: what is called with every bucket before and after it is averaged, and changes neither.

The drift guard, the optimizer that steps in backward, metrics and the norm of the gradients are observers. A hook has
any number of them.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from gradwire.exchanges.bucket import Bucket

PIECE = 1 << 16
"""Squares are added up in float32, which over millions of values loses four digits; so these many at a time."""


class Observer:
    """A base class whose methods do nothing: override those that you need, and append it to `hook.observers`.

    Examples:
        >>> class Sizes(gradwire.metrics.Observer):
        ...     def before_mean(self, bucket, first):
        ...         print(bucket.index, bucket.flat.numel())
        >>> hook.observers.append(Sizes())
    """

    def before_mean(self, bucket: Bucket, first: bool) -> None:
        """A bucket has arrived, and `first`: it opens a step. Called in the thread that runs backward.

        It may raise, if it does so on all ranks together. With `fully_shard` a bucket is what a unit reduces.
        """

    def after_mean(self, bucket: Bucket) -> None:
        """A bucket is averaged, and DDP has not read it yet. Called in a thread of the engine, and only for DDP."""

    def on_close(self) -> None:
        """The hook is closed."""


class GradNorm(Observer):
    """The norm of the gradients of a step, from the norms of its averaged buckets."""

    def __init__(self) -> None:
        self._norms: dict[int, Tensor] = {}

    def before_mean(self, bucket: Bucket, first: bool) -> None:
        """Start again with each step. The threads of the step before have ended."""
        if first:
            self._norms = {}

    def after_mean(self, bucket: Bucket) -> None:
        """The bucket is still in the cache of this core."""
        self._norms[bucket.index] = norm_of([bucket.flat])

    def total(self) -> Tensor:
        """The norm of all buckets, in the same order whichever was done first; 0 without any."""
        return get_total_norm([self._norms[index] for index in sorted(self._norms)])


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all values of these tensors together. It does not wait for an accelerator."""
    return get_total_norm([piece for tensor in tensors for piece in _values(tensor).split(PIECE)])


def _values(tensor: Tensor) -> Tensor:
    """The values in one dimension, in float32 or float64."""
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.reshape(-1).to(torch.promote_types(values.dtype, torch.float32))
