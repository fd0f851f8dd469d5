"""The products and the orthonormalisation of PowerSGD, on stacks of matrices.

A stack lies inside a flat tensor: `depth` matrices of `rows` x `cols`, `stride` values apart. Thin matrices have the
rank R in front, so that what belongs to one direction is contiguous: `p_BRM` next to rows, `q_BRN` next to columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

DEPENDENT = 1e-6
"""A row that keeps less than this of its length, once the rows before it are taken out, is rounding noise."""

Pair = tuple[Tensor, Tensor]
"""`p_BRM` and `q_BRN` of one stack."""


class Stack(NamedTuple):
    """Where some matrices of one shape are in a flat tensor."""

    start: int
    stride: int
    depth: int
    rows: int
    cols: int

    def of(self, flat: Tensor) -> Tensor:
        """The matrices as a view of `flat`, (depth, rows, cols)."""
        shape, strides = (self.depth, self.rows, self.cols), (self.stride, self.cols, 1)
        return flat.as_strided(shape, strides, flat.storage_offset() + self.start)


def project_(p_BRM: Tensor, flat: Tensor, residual: Tensor | None, stack: Stack, q_BRN: Tensor) -> None:
    """`a += residual`, if there is one, and `p = q aᵀ`: each row of `a` in the directions of `q`."""
    a_BMN = stack.of(flat)
    if residual is not None:
        a_BMN.add_(stack.of(residual))
    torch.bmm(q_BRN, a_BMN.transpose(1, 2), out=p_BRM)


def project_back_(q_BRN: Tensor, flat: Tensor, residual: Tensor | None, stack: Stack, p_BRM: Tensor) -> None:
    """`a += residual`, if there is one, and `q = p a`: each column of `a` in the directions of `p`."""
    a_BMN = stack.of(flat)
    if residual is not None:
        a_BMN.add_(stack.of(residual))
    torch.bmm(p_BRM, a_BMN, out=q_BRN)


def rebuild_(flat: Tensor, residual: Tensor | None, stack: Stack, sent: Pair, mean: Pair, keep: Tensor) -> None:
    """`residual = a - pᵀ q` of `sent`, where `keep` (one truth value) holds, and `a = pᵀ q` of `mean`."""
    a_BMN, (p_BRM, q_BRN) = stack.of(flat), mean
    if residual is not None:
        e_BMN, lost_BMN = stack.of(residual), a_BMN.baddbmm_(sent[0].transpose(1, 2), sent[1], alpha=-1)
        e_BMN.copy_(lost_BMN if _surely(keep) else torch.where(keep, lost_BMN, e_BMN))
    torch.bmm(p_BRM.transpose(1, 2), q_BRN, out=a_BMN)


def _surely(keep: Tensor) -> bool:
    """Whether `keep` is known to hold, without synchronising an accelerator."""
    return keep.device.type == "cpu" and bool(keep)


def orthonormalize_(x_BRM: Tensor) -> None:
    """Make the rows of each matrix orthonormal, in place. A row that depends on those before it becomes zero.

    Gram-Schmidt, twice over, in float64: nothing overflows, and no conditioning is too bad. NaN stays NaN.
    """
    rows = x_BRM.double()
    for k in range(rows.shape[1]):
        row, before = rows[:, k : k + 1], rows[:, :k]
        length = row.norm(dim=2, keepdim=True)
        for _ in range(2):
            row = row - torch.bmm(torch.bmm(row, before.transpose(1, 2)), before)
        left = row.norm(dim=2, keepdim=True)
        dependent = (left <= DEPENDENT * length) & length.isfinite()
        rows[:, k : k + 1] = torch.where(dependent, 0.0, row / left)
    x_BRM.copy_(rows)
