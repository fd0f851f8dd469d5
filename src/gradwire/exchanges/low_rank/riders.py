"""What travels beside P as it is, in low-rank averaging: small tensors, and a few rows of what each rank owes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.exchanges.low_rank.matrices import Layout


class Riders:
    """What travels beside P as it is: tensors not worth approximating, and a few rows of every memory."""

    def __init__(self, layout: Layout, work: Tensor, residual: Tensor | None, rows: Sequence[slice]) -> None:
        self._rest = [work.narrow(0, *where) for where in layout.rest]
        self._owed = [] if residual is None else [residual.narrow(0, *where) for where in layout.rest]
        self._memory, self._there = [], []
        for rest, owed in zip(self._rest, self._owed, strict=bool(self._owed)):
            rest.add_(owed)
        for group, part in zip(layout.matrices, rows, strict=True):
            if residual is not None and part.start < part.stop:
                self._memory.append(group.stack.of(residual)[:, part])
                self._there.append(group.stack.of(work)[:, part])

    @property
    def out(self) -> list[Tensor]:
        """What this rank sends."""
        return [*self._rest, *self._memory]

    def back_(self, means: Sequence[Tensor]) -> None:
        """What comes back. The matrices hold their rank's own memory by now: put the mean of all in its place."""
        for rest, mean in zip(self._rest, means, strict=False):
            rest.copy_(mean)
        for there, memory, mean in zip(self._there, self._memory, means[len(self._rest) :], strict=True):
            there.add_(mean - memory)

    def settle_(self, finite: Tensor) -> None:
        """What was owed to exact tensors, from before a switch, is paid now."""
        for owed in self._owed:
            owed.mul_(~finite)
