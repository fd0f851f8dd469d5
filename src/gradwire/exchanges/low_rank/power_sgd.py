"""PowerSGD: a gradient matrix travels as two thin matrices, found by one step of power iteration (Vogels et al., 2019).

    rank i:  A_i = M_i + E_i               the gradient plus the residual
             P   = sum of A_i Q            all-reduce; tensors that are not worth approximating travel along exactly
             P   = orthonormal(P)
             Q   = mean of A_iᵀ P          all-reduce
             M   = P Qᵀ                    the same on all ranks: the mean of A_i, projected onto the columns of P
             E_i = A_i - P (A_iᵀ P)ᵀ       this rank's share, so that the sum over the ranks is what was lost

With `sides=one` a step does only one half of this, in turn, with the other factor of the step before (Vogels et al.,
2020, call it a power iteration over time): half the bytes and one product less, for directions that are a step older.

    even steps:  P = mean of A_i Q,  M = P Qᵀ,  E_i = A_i - (A_i Q) Qᵀ     where Q is orthonormal(Q) of the step before
    odd steps:   Q = mean of A_iᵀ P,  M = P Qᵀ,  E_i = A_i - P (A_iᵀ P)ᵀ    where P is orthonormal(P) of the step before

A part of the residuals cancels between the ranks and would grow without limit where their data differ. So the residuals
are averaged, a few rows per step, in the first message: all of them once in `resync` steps.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs import CODECS, Codec
from gradwire.errors import SpecError, StateError
from gradwire.exchanges.base import Comm, Exchange
from gradwire.exchanges.bucket import Bucket, Memory, Segment, segments_of
from gradwire.exchanges.exact import exact_mean_
from gradwire.exchanges.exempt import check_matches, check_pattern, is_exempt
from gradwire.exchanges.feedback import working_copy
from gradwire.exchanges.low_rank.directions import Directions, Side
from gradwire.exchanges.low_rank.factors import Factors, Uncompressed
from gradwire.exchanges.low_rank.matrices import Matrices, MatrixLayout, lay_out, lay_out_whole, shape_of
from gradwire.exchanges.low_rank.reference import reference
from gradwire.exchanges.reference import Reference, exact_reference
from gradwire.kernels.torch.low_rank import Pair, Stack

Wire = Literal["fp32", "fp16", "bf16", "int8"]
Sides = Literal["one", "two"]
SHARE = 40
"""Averaging the residuals costs one part in so many of the bytes of P and Q, unless `resync` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank(Exchange):
    """PowerSGD."""

    name: ClassVar[str] = "powersgd"
    rank: int = 4
    """The rank of the approximation. A higher rank is closer to the mean and costs more bytes."""
    warmup: int = 0
    """The number of steps that average exactly before compression starts."""
    feedback: bool = True
    """Error feedback: add back at the next step what this step lost. Without it a model hardly trains."""
    warm_start: bool = True
    """Start from the directions of the step before; if False, from random ones."""
    min_compression: float = 2.0
    """A matrix that would not shrink by more than this factor travels exactly."""
    seed: int = 0
    """The seed of the first directions."""
    iterations: int = 1
    """Steps of power iteration per average: more are closer to the best approximation, at as many times the work."""
    sides: Sides = "two"
    """`one`: P and Q take turns, one per step. Half the bytes at the same rank."""
    batched: bool = False
    """Treat all tensors of a bucket as one matrix: a single product, but less accurate."""
    wire: Wire = "fp32"
    """How P and Q travel."""
    exempt: str = "none"
    """A pattern of names such as `embed|head` whose tensors travel exactly, besides those that would not shrink."""
    resync: int | None = None
    """The number of steps in which every residual is averaged once; 0: never. By default it costs 2.5% of P and Q."""

    same_kernels = True
    """All ranks must have Numba, or none: only the same code makes products with the same bits."""
    buckets = 0
    """DDP's own: little travels, so smaller buckets would hide little, and each bucket costs Python time."""

    def __post_init__(self) -> None:
        for field, least in (("rank", 1), ("warmup", 0), ("iterations", 1), ("resync", 0)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise SpecError(f"powersgd: {field} must be at least {least}, got {value}")
        if not 0.0 < self.min_compression < math.inf:
            raise SpecError(f"powersgd: min_compression must be above 0, got {self.min_compression}")
        if self.sides == "one" and (self.iterations > 1 or not self.warm_start):
            raise SpecError("powersgd: sides=one continues the step before; leave iterations=1 and warm_start=true")
        check_pattern("powersgd", self.exempt)
        if self.batched and self.exempt != "none":
            raise SpecError("powersgd: batched=true takes a bucket as a whole; it does not go with exempt")

    @property
    def lanes(self) -> int:
        """P and Q, each in one collective, or in two if a codec carries them between more than two ranks."""
        return self.iterations * (1 if self.sides == "one" else 2) * (1 if self.wire == "fp32" else 2)

    @property
    def takes_residual(self) -> bool:
        """With feedback on."""
        return self.feedback

    align = 0
    """Matrices stay whole."""

    def chunk_bytes(self, size: int) -> int:
        """Little travels, so what matters is that the work on one chunk hides the wire of another."""
        return 1 << 40 if self.batched else 8 << 20

    def bound(self, size: int) -> float:
        """A projection never loses more than everything; the wire of Q adds its own error."""
        codec = self._codec()
        return 1.001 + (0.0 if codec is None else 2.1 * codec.bound)

    # -- the algorithm -----------------------------------------------------------------------------------------

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Average as described above; exactly during the warm-up, and if no matrix is worth approximating."""
        layout = self.lay_out(bucket)
        if bucket.step < self.warmup or not layout.matrices:
            exact_mean_(bucket.flat, comm, residual)
            return
        work = working_copy(bucket.flat)
        self._approximate_(bucket, work, layout, comm, residual)
        if work is not bucket.flat:
            bucket.flat.copy_(work)

    def _approximate_(
        self, bucket: Bucket, work: Tensor, layout: MatrixLayout, comm: Comm, residual: Tensor | None
    ) -> None:
        groups, (start, end) = layout.matrices, self._turn(bucket.step)
        kernel, job = kernels.pick("low_rank", work), _Job(work, groups, comm, self._codec())
        uncompressed = Uncompressed(layout, work, residual, [self._rows(bucket.step, group) for group in groups])
        directions = [start.recall(bucket, group, work) for group in groups]
        if self.sides == "one":
            sent, mean, finite = _half_step(job, end.side, directions, residual, uncompressed)
        else:
            sent, mean, finite = _power_step(job, directions, residual, uncompressed)
        for _ in range(self.iterations - 1):
            sent, mean, also = _power_step(job, [q for _, q in mean])
            finite &= also
        for group, own, everyone in zip(groups, sent, mean, strict=True):
            kernel.rebuild_(work, residual, group.stack, own, everyone, finite)
            end.keep(bucket, group, everyone[0 if end.side == "p" else 1], finite)
        uncompressed.clear_pending_(finite)

    def reference(self, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None = None) -> Reference:
        """The algorithm in float64: within 1e-4 of the largest value of a matrix, and the error bound of `wire`."""
        layout, step = self.lay_out(buckets[0]), buckets[0].step
        if step < self.warmup or not layout.matrices:
            return exact_reference(buckets, residuals)
        rows = [self._rows(step, group) for group in layout.matrices]
        return reference(buckets, residuals, layout, rows, self._turn(step), self._codec(), self.iterations)

    def lay_out(self, bucket: Bucket) -> MatrixLayout:
        """Which tensors of a bucket are approximated, and which travel exactly."""
        if self.batched:
            return lay_out_whole(bucket, self.rank, self._shrinks)
        return lay_out(bucket, self.rank, self._is_worth)

    def _is_worth(self, segment: Segment, rows: int, cols: int) -> bool:
        return self._shrinks(rows, cols) and not is_exempt(self.exempt, segment)

    def _shrinks(self, rows: int, cols: int) -> bool:
        return self._values(rows, cols) * self.min_compression < rows * cols

    def _values(self, rows: int, cols: int) -> float:
        """How many values of a matrix travel in a step, on average."""
        return self.rank * (rows + cols) / (2 if self.sides == "one" else 1)

    def _codec(self) -> Codec | None:
        return None if self.wire == "fp32" else CODECS[self.wire]()

    def _turn(self, step: int) -> tuple[Directions, Directions]:
        """The directions that a step starts from, and those that it ends with."""
        q = Directions("q", self.batched, self.seed, self.warm_start)
        if self.sides == "two":
            return q, q
        p = q._replace(side="p")
        return (q, p) if step % 2 == 0 else (p, q)

    def _rows(self, step: int, group: Matrices) -> slice:
        """The rows of each matrix whose residual is averaged in this step."""
        size = group.stack.rows, group.stack.cols
        period = round(SHARE * math.prod(size) / self._values(*size)) if self.resync is None else self.resync
        if period == 0:
            return slice(0, 0)
        place, rows = step % period, group.stack.rows
        return slice(rows * place // period, rows * (place + 1) // period)

    # -- registration and checkpoints --------------------------------------------------------------------------

    def check(self, params: Sequence[tuple[str, Tensor]]) -> None:
        """Warn if there is nothing to approximate."""
        check_matches("powersgd", self.exempt, params)
        shapes = [shape_of(param) for _, param in params]
        if params and not self.batched and not any(self._shrinks(*shape) for shape in shapes):
            rows, cols = max(shapes, key=min)
            largest = f"the largest is {rows} x {cols}" if rows else "there is none"
            warnings.warn(
                f"powersgd: at rank={self.rank} no matrix of this model would shrink more than "
                f"{self.min_compression:g} times ({largest}), so all travels exactly; use a lower rank, or 'bf16'",
                stacklevel=4,
            )

    def check_memory(self, memory: Mapping[str, Mapping[str, Tensor]], params: Sequence[tuple[str, Tensor]]) -> None:
        """Raise StateError for directions of another rank or of other shapes."""
        wrong = []
        for name, param in params:
            rows, cols = shape_of(param)
            for directions in {*self._turn(0)} if self.batched or self._shrinks(rows, cols) else ():
                kept = memory.get(name, {}).get(directions.key)
                wanted = self._shape(directions, rows, cols, kept)
                if kept is not None and tuple(kept.shape) != wanted:
                    wrong.append(f"{name} {tuple(kept.shape)}, here {wanted}")
        if wrong:
            raise StateError(
                f"the checkpoint is of another rank or model; (rank, columns) by parameter: {'; '.join(wrong)}"
            )

    def _shape(self, directions: Directions, rows: int, cols: int, kept: Tensor | None = None) -> tuple[int, int]:
        """The shape of the directions of a rows x cols parameter. That of a whole bucket can be any of this rank."""
        if self.batched and kept is not None:  # the matrix of a small bucket may have fewer rows than `rank`
            return (self.rank if kept.shape[-1] > 2 * self.rank else kept.shape[0], kept.shape[-1])
        return min(self.rank, rows, cols), cols if directions.side == "q" else rows

    def new_memory(self, params: Sequence[tuple[str, Tensor]], device: torch.device) -> Memory:
        """Directions that are zero, which random ones replace. Those of `batched` depend on the buckets: none."""
        if self.batched or not self.warm_start:
            return {}
        names, tensors = [name for name, _ in params], [param for _, param in params]
        shapes = {segment.name: (segment, *shape_of(segment.param)) for segment in segments_of(tensors, names)}
        return {
            name: {each.key: torch.zeros(self._shape(each, rows, cols), device=device) for each in self._turn(0)}
            for name, (segment, rows, cols) in shapes.items()
            if self._is_worth(segment, rows, cols)
        }

    def warm_up(self, device: torch.device) -> None:
        """Use every kernel once."""
        flat, stack = torch.ones(64, device=device), Stack(0, 64, 1, 8, 8)
        kernel, p, q = kernels.pick("low_rank", flat), *(torch.ones((1, 1, 8), device=device) for _ in range(2))
        kernel.project_(p, flat, flat.clone(), stack, q)
        kernel.orthonormalize_(p)
        for residual in (None, flat.clone()):
            kernel.project_back_(q, flat, residual, stack, p)
            kernel.rebuild_(flat, residual, stack, (p, q), (p, q), torch.ones((), dtype=torch.bool, device=device))


class _Job(NamedTuple):
    """The matrices of a chunk, and how their factors travel."""

    work: Tensor
    groups: Sequence[Matrices]
    comm: Comm
    codec: Codec | None

    def message(self, side: Side, uncompressed: Sequence[Tensor] = ()) -> Factors:
        """Room for one factor of every matrix."""
        sizes = [group.stack.rows if side == "p" else group.stack.cols for group in self.groups]
        shapes = [(group.stack.depth, group.matrix_rank, size) for group, size in zip(self.groups, sizes, strict=True)]
        return Factors(shapes, self.work, uncompressed)

    def factor(
        self,
        side: Side,
        directions: Sequence[Tensor],
        sent: Factors | None = None,
        residual: Tensor | None = None,
        uncompressed: Uncompressed | None = None,
    ) -> tuple[Factors, Tensor]:
        """One factor of every matrix, averaged, and whether all is finite. `sent` becomes what this rank has sent."""
        kernel = kernels.pick("low_rank", self.work)
        mean = self.message(side, uncompressed.out if uncompressed else ())
        product = kernel.project_ if side == "p" else kernel.project_back_
        for group, to, along in zip(self.groups, mean.factors, directions, strict=True):
            product(to, self.work, residual, group.stack, along)
        finite = mean.mean_(self.comm, self.codec, sent)
        if uncompressed is not None:
            uncompressed.put_back_(mean.uncompressed)
        return mean, finite


def _power_step(
    job: _Job, directions: Sequence[Tensor], residual: Tensor | None = None, uncompressed: Uncompressed | None = None
) -> tuple[list[Pair], list[Pair], Tensor]:
    """P and Q of every matrix as this rank has sent them, their means, and whether all that travelled is finite."""
    p, finite = job.factor("p", directions, None, residual, uncompressed)
    for across in p.factors:
        kernels.pick("low_rank", across).orthonormalize_(across)
    sent = job.message("q")
    q, also = job.factor("q", p.factors, sent)
    pairs = [list(zip(p.factors, each.factors, strict=True)) for each in (sent, q)]
    return pairs[0], pairs[1], finite & also


def _half_step(
    job: _Job, side: Side, directions: Sequence[Tensor], residual: Tensor | None, uncompressed: Uncompressed
) -> tuple[list[Pair], list[Pair], Tensor]:
    """The same where only one factor travels; the other one is `directions`."""
    sent = job.message(side, uncompressed.out)
    mean, finite = job.factor(side, directions, sent, residual, uncompressed)
    pairs = [list(zip(each.factors, directions, strict=True)) for each in (sent, mean)]
    own, everyone = pairs if side == "p" else [[(p, q) for q, p in each] for each in pairs]
    return own, everyone, finite
