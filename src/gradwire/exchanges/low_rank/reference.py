"""The reference of PowerSGD: the algorithm of the paper, matrix after matrix, in float64."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.low_rank.directions import Directions, Side
from gradwire.exchanges.low_rank.matrices import Matrices, MatrixLayout
from gradwire.exchanges.reference import Reference, coded_message, fed, kept
from gradwire.kernels.torch.low_rank import DEPENDENT, Pair

ROUNDING = 1e-4
"""What float32 may lose of the largest value of a matrix, in two products and an orthonormalization."""


class Matrix(NamedTuple):
    """One matrix of a bucket, and the directions, Q (R, N) or P (R, M), that the step starts from."""

    group: Matrices
    name: str
    where: slice
    start: Tensor
    synced: slice
    """The rows whose residuals are averaged in this step."""

    def of(self, flat: Tensor) -> Tensor:
        """The matrix (M, N), as a view."""
        return flat[self.where].view(self.group.stack.rows, self.group.stack.cols)


def reference(
    buckets: Sequence[Bucket],
    residuals: Sequence[Tensor] | None,
    layout: MatrixLayout,
    synced: Sequence[slice],
    turn: tuple[Directions, Directions],
    codec: Codec | None,
    iterations: int,
) -> Reference:
    """P = orthonormal(mean of A Q), Q = mean of Aᵀ P, result P Qᵀ, where A is a rank's gradient and its residual.

    `turn` are the directions that the step starts from and ends with: if they differ, only one factor is made, the
    other one is what it starts from. `synced` are the rows of each group's matrices whose residuals are averaged over
    the ranks.
    """
    a = [fed(bucket, None if residuals is None else residuals[i]).double() for i, bucket in enumerate(buckets)]
    matrices = _matrices(buckets[0], layout, synced, turn[0])
    mean, tolerance = torch.stack(a).mean(0), len(a) * torch.finfo(torch.float32).eps * torch.stack(a).abs().mean(0)
    projected = [own.clone() for own in a]
    if residuals is not None:
        _sync_(matrices, a, residuals)
    if turn[0] == turn[1]:
        p, q, sent = _two_sided(matrices, projected, a, codec, iterations)
    else:
        p, q, sent = _one_sided(matrices, projected, codec, turn[1].side)
    left = [torch.zeros_like(own) for own in a]
    for i, matrix in enumerate(matrices):
        matrix.of(mean).copy_(p[i].T @ q[i])
        for own, lost, parts in zip(a, left, sent, strict=True):
            matrix.of(lost).copy_(matrix.of(own) - parts[i][0].T @ parts[i][1])
        largest = max(float(own[matrix.where].nan_to_num(0.0, 0.0, 0.0).abs().max()) for own in a)
        tolerance[matrix.where] = largest * (ROUNDING + (0.0 if codec is None else codec.bound))
    finite = torch.isfinite(mean).all()
    for matrix, *new in zip(matrices, p, q, strict=True):
        group = matrix.group._replace(names=(matrix.name,))
        turn[1].keep(buckets[0], group, new[turn[1].side == "q"][None], finite)
    dtype = buckets[0].flat.dtype
    if dtype.itemsize < 4:
        tolerance += torch.finfo(dtype).eps * mean.nan_to_num(0.0, 0.0, 0.0).abs()
    return Reference(mean.to(dtype), tolerance, kept(mean, residuals, left))


def _two_sided(
    matrices: Sequence[Matrix], first: Sequence[Tensor], later: Sequence[Tensor], codec: Codec | None, iterations: int
) -> tuple[Sequence[Tensor], Sequence[Tensor], list[list[Pair]]]:
    """P and Q of each matrix, and both as every rank has sent them. `first` is A for the first product only."""
    q = [matrix.start for matrix in matrices]
    for iteration in range(iterations):
        p, _ = _average(_projected(matrices, later if iteration else first, q, "p"), codec)
        p = [orthonormal(p_RM) for p_RM in p]
        q, sent = _average(_projected(matrices, later, p, "q"), codec)
    return p, q, [list(zip(p, own, strict=True)) for own in sent]


def _one_sided(
    matrices: Sequence[Matrix], a: Sequence[Tensor], codec: Codec | None, side: Side
) -> tuple[Sequence[Tensor], Sequence[Tensor], list[list[Pair]]]:
    """The same if only the factor `side` travels."""
    start = [matrix.start for matrix in matrices]
    mean, sent = _average(_projected(matrices, a, start, side), codec)
    if side == "p":
        return mean, start, [list(zip(own, start, strict=True)) for own in sent]
    return start, mean, [list(zip(start, own, strict=True)) for own in sent]


def _projected(
    matrices: Sequence[Matrix], a: Sequence[Tensor], directions: Sequence[Tensor], side: Side
) -> list[list[Tensor]]:
    """Every rank's matrices along `directions`."""
    pairs = list(zip(matrices, directions, strict=True))
    return [[along @ (m.of(own).T if side == "p" else m.of(own)) for m, along in pairs] for own in a]


def _matrices(bucket: Bucket, layout: MatrixLayout, synced: Sequence[slice], directions: Directions) -> list[Matrix]:
    """Every matrix by itself, with directions from the memory, or random ones in place of those that are zero."""
    dtype = torch.float64 if bucket.flat.dtype == torch.float64 else torch.float32
    like = torch.empty(0, dtype=dtype, device=bucket.flat.device)
    matrices = []
    for group, rows in zip(layout.matrices, synced, strict=True):
        start, stride, _, height, width = group.stack
        for i, name in enumerate(group.names):
            fresh = directions.random(bucket.step, name, group, like).double()
            old = directions.kept(bucket, name, group)
            q_RN = orthonormal(fresh if old is None else old.double())
            gone = (q_RN == 0).all(1, keepdim=True)
            where = slice(start + i * stride, start + i * stride + height * width)
            matrices.append(Matrix(group, name, where, orthonormal(torch.where(gone, fresh, q_RN)), rows))
    return matrices


def _sync_(matrices: Sequence[Matrix], a: Sequence[Tensor], residuals: Sequence[Tensor]) -> None:
    """Replace the residual inside A by the mean over the ranks, in the rows whose turn it is."""
    everyone = torch.stack([residual.double() for residual in residuals])
    mean = everyone.mean(0)
    for matrix in matrices:
        for own, residual in zip(a, everyone, strict=True):
            matrix.of(own)[matrix.synced] += matrix.of(mean)[matrix.synced] - matrix.of(residual)[matrix.synced]


def _average(factors: Sequence[Sequence[Tensor]], codec: Codec | None) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The mean over the ranks of each thin matrix, and what every rank has sent of it."""
    if codec is None:
        return [torch.stack(each).mean(0) for each in zip(*factors, strict=True)], [list(own) for own in factors]
    shapes, size = [factor.shape for factor in factors[0]], len(factors)
    messages = [torch.cat([factor.reshape(-1) for factor in own]).float() for own in factors]
    numels = [length for directions, length in shapes for _ in range(directions)]
    mean, lost = coded_message(messages, numels, [False] * len(numels), [codec] * size, size <= 2)
    flats = [mean, *(own - gone for own, gone in zip(messages, lost, strict=True))]
    split = [flat.double().split([shape.numel() for shape in shapes]) for flat in flats]
    result, *sent = [[part.view(shape) for part, shape in zip(parts, shapes, strict=True)] for parts in split]
    return result, sent


def orthonormal(rows: Tensor) -> Tensor:
    """Gram-Schmidt, twice over. A row that depends on those before it becomes zero."""
    done: list[Tensor] = []
    for row in rows:
        left = row
        for other in (*done, *done):
            left = left - (left @ other) * other
        dependent = bool(row.norm().isfinite()) and bool(left.norm() <= DEPENDENT * row.norm())
        done.append(torch.zeros_like(row) if dependent else left / left.norm())
    return torch.stack(done)
