"""The messages of PowerSGD: the thin factors of all matrices of a chunk, and what travels with them exactly.

[ factors of the first stack, B x R x length ][ of the next stack ] ... [ uncompressed tensors ]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.exchanges.base import Comm
from gradwire.exchanges.low_rank.matrices import MatrixLayout
from gradwire.exchanges.plan import Run, one_shot_, plan, two_shot_
from gradwire.kernels.memory import empty

Shape = tuple[int, int, int]
"""The number of matrices, the rank, and the number of rows (for P) or columns (for Q)."""


class Factors:
    """The factors P or Q of all matrices of a chunk in one message, with tensors that travel uncompressed."""

    def __init__(self, shapes: Sequence[Shape], like: Tensor, uncompressed: Sequence[Tensor] = ()) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._shapes, self._uncompressed, self._split = list(shapes), list(uncompressed), sum(sizes)
        self.flat = empty((self._split + sum(tensor.numel() for tensor in uncompressed),), like.dtype, like.device)
        parts = self.flat.split([*sizes, *(tensor.numel() for tensor in uncompressed)])
        self.factors = [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
        self.uncompressed = [
            part.view(tensor.shape) for part, tensor in zip(parts[len(sizes) :], uncompressed, strict=True)
        ]
        for place, tensor in zip(self.uncompressed, uncompressed, strict=True):
            place.copy_(tensor)

    def mean_(self, comm: Comm, codec: Codec | None, sent: Factors | None = None) -> Tensor:
        """Average over the ranks. Returns whether all values are finite, as a tensor, the same on all ranks.

        `sent` becomes what this rank has put on the wire after encoding; its sum over the ranks is size * mean.
        """
        if sent is not None:
            sent.flat.copy_(self.flat)
        if codec is None:
            comm.all_reduce_(self.flat.div_(comm.size))
        else:
            self._coded_mean_(comm, codec, sent)
        return torch.isfinite(self.flat).all()

    def _coded_mean_(self, comm: Comm, codec: Codec, sent: Factors | None) -> None:
        """Average through a codec. A block of the codec never holds values of two directions."""
        one = comm.size <= 2
        runs = [Run(length, False) for count, rank, length in self._shapes for _ in range(count * rank)]
        runs += [Run(tensor.numel(), True) for tensor in self._uncompressed]
        lost = None if sent is None else torch.zeros_like(self.flat)
        way, parts = (one_shot_, 1) if one else (two_shot_, comm.size)
        way(self.flat, plan(tuple(runs), parts, codec), codec, comm, lost)
        if sent is not None and lost is not None:
            sent.flat.sub_(lost)


class Uncompressed:
    """What travels with P uncompressed: tensors not worth approximating, and a few rows of every residual."""

    def __init__(self, layout: MatrixLayout, work: Tensor, residual: Tensor | None, rows: Sequence[slice]) -> None:
        self._rest = [work.narrow(0, *where) for where in layout.rest]
        self._pending = [] if residual is None else [residual.narrow(0, *where) for where in layout.rest]
        self._rows, self._targets = [], []
        for rest, pending in zip(self._rest, self._pending, strict=bool(self._pending)):
            rest.add_(pending)
        for group, part in zip(layout.matrices, rows, strict=True):
            if residual is not None and part.start < part.stop:
                self._rows.append(group.stack.of(residual)[:, part])
                self._targets.append(group.stack.of(work)[:, part])

    @property
    def out(self) -> list[Tensor]:
        """The tensors that this rank sends."""
        return [*self._rest, *self._rows]

    def put_back_(self, means: Sequence[Tensor]) -> None:
        """Write the averages back. The matrices include this rank's own residual by now: replace it by the mean."""
        for rest, mean in zip(self._rest, means, strict=False):
            rest.copy_(mean)
        for target, rows, mean in zip(self._targets, self._rows, means[len(self._rest) :], strict=True):
            target.add_(mean - rows)

    def clear_pending_(self, finite: Tensor) -> None:
        """Residuals of exact tensors, left from before a switch, are applied now: drop them if the mean is finite."""
        for pending in self._pending:
            pending.mul_(~finite)
