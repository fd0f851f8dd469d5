"""Which gradients of a bucket are matrices worth approximating, where they lie, and which tensors travel exactly."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gradwire.exchanges.bucket import Bucket, Segment
from gradwire.kernels.torch.low_rank import Stack


class Matrices(NamedTuple):
    """Matrices of one shape, equally far apart, so that one product serves them all."""

    stack: Stack
    names: tuple[str, ...]
    """The parameters that they belong to."""
    matrix_rank: int
    """The rank of the approximation."""


class MatrixLayout(NamedTuple):
    """The matrices of a bucket, and the rest of it."""

    matrices: tuple[Matrices, ...]
    rest: tuple[tuple[int, int], ...]
    """(start, numel) of the values that travel exactly."""

    @property
    def values(self) -> int:
        """How many values travel: P and Q of each matrix, and the rest."""
        thin = sum(
            group.matrix_rank * group.stack.depth * (group.stack.rows + group.stack.cols) for group in self.matrices
        )
        return thin + sum(numel for _, numel in self.rest)


def lay_out(bucket: Bucket, matrix_rank: int, worth: Callable[[Segment, int, int], bool]) -> MatrixLayout:
    """Sort the tensors of a bucket. `worth` tells whether a rows x cols matrix is worth approximating."""
    matrices: list[Matrices] = []
    rest: list[tuple[int, int]] = []
    at = 0
    for segment in bucket.segments:
        rows, cols = shape_of(segment.param)
        if rows * cols == segment.numel > 0 and worth(segment, rows, cols):
            _append(matrices, segment.name, at, rows, cols, min(matrix_rank, rows, cols))
        elif segment.numel:
            rest.append((at, segment.numel))
        at += segment.numel
    return MatrixLayout(tuple(matrices), tuple(rest))


def lay_out_whole(bucket: Bucket, matrix_rank: int, shrinks: Callable[[int, int], bool]) -> MatrixLayout:
    """The bucket as one matrix, nearly square; the few values that are left over travel exactly."""
    numel = bucket.flat.numel()
    if numel == 0:
        return MatrixLayout((), ())
    side = math.isqrt(numel)
    near = range(max(1, side - side // 8), side + 1)
    rows = min(near, key=lambda rows: matrix_rank * (rows + numel // rows) + numel % rows)  # the values that travel
    cols = numel // rows
    if not shrinks(rows, cols):
        return MatrixLayout((), ((0, numel),))
    left = numel - rows * cols
    whole = Matrices(Stack(0, 0, 1, rows, cols), (bucket.names[0],), min(matrix_rank, rows, cols))
    return MatrixLayout((whole,), ((numel - left, left),) if left else ())


def shape_of(param: Tensor) -> tuple[int, int]:
    """A parameter as a matrix, as it lies in memory: outermost dimension x all others; (0, 0) for vectors.

    A transposed matrix is as good as the matrix itself. Complex values are adjacent pairs of real ones.
    """
    if param.dim() < 2 or param.numel() == 0:
        return 0, 0
    outer = max(range(param.dim()), key=lambda dim: (param.stride(dim), param.shape[dim] > 1, -dim))
    pair = 2 if param.is_complex() else 1
    return param.shape[outer], param.numel() // param.shape[outer] * pair


def _append(matrices: list[Matrices], name: str, at: int, rows: int, cols: int, matrix_rank: int) -> None:
    """Add a matrix to the last stack if shape and distance fit, else start a new stack."""
    last = matrices[-1] if matrices else None
    if last is not None and (last.stack.rows, last.stack.cols) == (rows, cols):
        start, stride, count, *_ = last.stack
        if count == 1 or at - start == count * stride:
            stack = Stack(start, stride if count > 1 else at - start, count + 1, rows, cols)
            matrices[-1] = Matrices(stack, (*last.names, name), matrix_rank)
            return
    matrices.append(Matrices(Stack(at, rows * cols, 1, rows, cols), (name,), matrix_rank))
