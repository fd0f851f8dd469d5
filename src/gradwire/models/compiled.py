"""Averages that torch.compile can trace, for DDP's Python reducer under compiled autograd."""

from __future__ import annotations

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
        """A new tensor: the compiler decides what is in place."""
        return self.all_gather(rows[self.rank])

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """(size, n) -> (size, n)."""
        return traced_all_to_all(tensor, self.group)


def traced_mean(exchange: Exchange, group: dist.ProcessGroup, grad: Tensor, param: Tensor) -> Any:
    """Average one gradient in place, in a way that torch.compile can trace. The result is the gradient itself.

    Sizes come from the parameter, as those of the gradient may be symbols.
    """
    if exchange.lanes and group.size() > 1:
        flat = grad.reshape(-1).clone()
        exchange.mean_(Bucket(0, flat, segments_of([param], ["traced"]), is_last=True), TracedComm(group))
        grad.copy_(flat.view_as(grad))
    return grad
