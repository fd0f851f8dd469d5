"""Averages that torch.compile can trace, for DDP's Python reducer under compiled autograd.

That reducer has no buckets: while the backward pass is traced it calls the hook for each parameter, with the pair
`(gradient, parameter)`. Everything on this path must be plain enough for `torch.compile(fullgraph=True)`: exchanges are
made before, no annotations are read, and no caches or threads are used.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire._torch.traced import traced_all_gather, traced_all_to_all, traced_sum
from gradwire.exchanges.base import Comm, Exchange
from gradwire.exchanges.bucket import Bucket, segments_of


class TracedComm:
    """Collectives that torch.compile can trace."""

    levels: Sequence[Comm] = ()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks."""
        return tensor.copy_(traced_sum(tensor, self.group))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(n,) -> (size, n)."""
        return traced_all_gather(tensor, self.group).view(self.size, -1)

    def rows(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(size, numel)."""
        return torch.empty((self.size, numel), dtype=dtype, device=device)

    def all_gather_(self, rows: Tensor) -> Tensor:
        """Returns a new tensor: the compiler decides what happens in place."""
        return self.all_gather(rows[self.rank])

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """(size, n) -> (size, n)."""
        return traced_all_to_all(tensor, self.group)


def traced_mean(exchange: Exchange, group: dist.ProcessGroup, grad: Tensor, param: Tensor) -> Any:
    """Average one gradient in place, in a way that torch.compile can trace.

    Returns:
        The gradient itself. It is typed as Any because a hook declares a Future, which the reducer does not use.
    """
    if exchange.lanes and group.size() > 1:
        flat = grad.reshape(-1).clone()
        segments = segments_of([param], ["traced"])  # of the parameter, as the sizes of the gradient may be symbols
        exchange.mean_(Bucket(0, flat, segments, is_last=True), TracedComm(group))
        grad.copy_(flat.view_as(grad))
    return grad
