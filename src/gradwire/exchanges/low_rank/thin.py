"""Thin matrices on their way: all of a chunk in one message, with riders that travel as they are.

[ factors of the first stack, B x R x length ][ of the next ] ... [ riders ]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.exchanges.base import Comm
from gradwire.exchanges.plan import Run, one_shot_, plan, two_shot_
from gradwire.kernels.memory import empty

Shape = tuple[int, int, int]
"""Matrices, directions, length."""


class Thin:
    """One message."""

    def __init__(self, shapes: Sequence[Shape], like: Tensor, riders: Sequence[Tensor] = ()) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._shapes, self._riders, self._split = list(shapes), list(riders), sum(sizes)
        self.flat = empty((self._split + sum(rider.numel() for rider in riders),), like.dtype, like.device)
        parts = self.flat.split([*sizes, *(rider.numel() for rider in riders)])
        self.factors = [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
        self.riders = [part.view(rider.shape) for part, rider in zip(parts[len(sizes) :], riders, strict=True)]
        for place, rider in zip(self.riders, riders, strict=True):
            place.copy_(rider)

    def mean_(self, comm: Comm, codec: Codec | None, sent: Thin | None = None) -> Tensor:
        """Average over the ranks; whether all of it is finite, as a tensor, the same on all ranks.

        `sent` becomes what this rank has really put on the wire: the sum over the ranks is `size` times the mean.
        """
        if sent is not None:
            sent.flat.copy_(self.flat)
        if codec is None:
            comm.all_reduce_(self.flat.div_(comm.size))
        else:
            self._coded_mean_(comm, codec, sent)
        return torch.isfinite(self.flat).all()

    def _coded_mean_(self, comm: Comm, codec: Codec, sent: Thin | None) -> None:
        """A block of the codec never holds values of two directions."""
        one = comm.size <= 2
        runs = [Run(length, False) for count, rank, length in self._shapes for _ in range(count * rank)]
        runs += [Run(rider.numel(), True) for rider in self._riders]
        lost = None if sent is None else torch.zeros_like(self.flat)
        way, parts = (one_shot_, 1) if one else (two_shot_, comm.size)
        way(self.flat, plan(tuple(runs), parts, codec), codec, comm, lost)
        if sent is not None and lost is not None:
            sent.flat.sub_(lost)
