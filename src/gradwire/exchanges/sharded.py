"""Coded reduce-scatter and all-gather, for models whose parameters are sharded over the ranks (FSDP2).

    rank 0  [ row 0 | row 1 ]    reduce-scatter    rank 0  [ sum of the rows 0 ]
    rank 1  [ row 0 | row 1 ]   --------------->   rank 1  [ sum of the rows 1 ]

A row holds the shards of one rank: a piece of every parameter, in the same order and of the same sizes in every row, so
the segments of one row describe all of them. Blocks of a codec never hold values of two tensors. Both algorithms use
the part encoders of `plan.py` and the codec of a `Coded` exchange; its other options are those of averages.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.base import Codec
from gradwire.errors import SpecError
from gradwire.exchanges.base import Comm, Exchange
from gradwire.exchanges.bucket import Bucket, Segment
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.exact import Exact, Noop
from gradwire.exchanges.feedback import finite, widens
from gradwire.exchanges.plan import (
    Part,
    WirePlan,
    add_narrow_,
    decode_narrow_,
    decode_part_,
    encode_part,
    joined,
    keep_loss_,
)
from gradwire.exchanges.reference import Reference, kept
from gradwire.kernels.memory import empty, release


@dataclass(frozen=True, slots=True)
class Shard:
    """How one parameter is cut: every row holds `padded.numel()` of its values."""

    name: str
    param: Tensor
    """The sharded parameter, which has the shape of the whole one."""
    whole: torch.Size
    """The shape of the whole parameter."""
    padded: torch.Size
    """The shape of the largest shard. Smaller ones are padded with zeros, at the end."""
    dim: int
    """The dimension that is cut. All but dimension 0 are cut evenly."""

    @property
    def segment(self) -> Segment:
        """Its values within a row."""
        return Segment(self.name, self.param, 0, self.padded.numel())

    def to_rows(self, flat: Tensor, size: int) -> Tensor:
        """The values of the whole parameter, (numel,), as the rows of `size` ranks."""
        if self.dim:
            return torch.stack(flat.view(self.whole).chunk(size, self.dim)).reshape(size, -1)
        rows = flat.new_zeros(size * self.padded.numel())
        rows[: flat.numel()] = flat
        return rows.view(size, -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The inverse of `to_rows`."""
        if self.dim:
            return torch.cat(rows.view(-1, *self.padded).unbind(), self.dim).reshape(-1)
        return rows.reshape(-1)[: self.whole.numel()].clone()


# -- which exchanges can do it ----------------------------------------------------------------------------------------


def check_scatters(exchange: Exchange) -> None:
    """Raise SpecError unless the exchange can reduce-scatter gradients."""
    if isinstance(exchange, Exact | Noop):
        return
    if not isinstance(exchange, Coded):
        raise SpecError(
            f"{exchange} cannot reduce-scatter the gradients of a sharded model; use exact or a codec such as int8, "
            "and powersgd for replicas=..., where whole shards are averaged"
        )
    _check_options(exchange, "the reduce-scatter of a sharded model", ("accumulate", "shots", "allocate", "whiten"))


def check_gathers(exchange: Exchange) -> None:
    """Raise SpecError unless the exchange can carry gathered parameters."""
    if isinstance(exchange, Exact):
        return
    if not isinstance(exchange, Coded) or exchange.codec.needs_feedback:
        raise SpecError(f"gather={exchange} cannot carry parameters; use exact, bf16, fp16, fp8, int8 or another codec")
    if exchange.codec.is_random:
        raise SpecError(
            f"gather={exchange} rounds stochastically, so that forward and backward would use different parameters; "
            f"use gather={exchange.codec.name}"
        )
    _check_options(exchange, "the gather of parameters", ("accumulate", "shots", "allocate", "whiten", "feedback"))


def _check_options(exchange: Coded, what: str, options: Sequence[str]) -> None:
    plain = Coded(exchange.codec)
    wrong = [name for name in options if getattr(exchange, name) != getattr(plain, name)]
    if wrong:
        raise SpecError(f"{exchange}: {what} has no option {', '.join(wrong)}; leave it out")


# -- the algorithms ---------------------------------------------------------------------------------------------------


def scatter_(
    coded: Coded, rows: Tensor, out: Tensor, bucket: Bucket, comm: Comm, alpha: float, residual: Tensor | None = None
) -> None:
    """`out = alpha * (sum over the ranks of the row of this rank)`. `rows` is (size, n) and `out` is (n,).

    1. Encode each row for its owner; the own row stays as it is.  2. All-to-all.  3. The owner adds its own row and the
    decoded ones, in the order of the ranks, in float32.

    The engine calls the two halves, `encode_rows` and `add_arrived_`, by itself, to drop `rows` between them.

    Args:
        coded: The codec, and which tensors travel in float32.
        rows: The gradients of this rank. They stay as they are.
        out: The result, in any floating type.
        bucket: Its segments are those of a row, its index and step seed what is random; `flat` is not used.
        comm: The collectives. All ranks must call this with the same sizes.
        alpha: The factor of the sum: 1 / size for the mean.
        residual: With feedback, (size, n) in float32: added to `rows` first, then what the encoding of each row has
            lost. If the sum of any row is not finite it stays as it was, on all ranks.
    """
    work = None if residual is None else residual.clone()
    sent = encode_rows(coded, rows, out, bucket, comm, alpha, work)
    is_finite = add_arrived_(coded, sent, out, bucket, comm, alpha)
    if residual is not None and work is not None and is_finite is not None:
        residual.copy_(torch.where(is_finite, work, residual))


class Sent(NamedTuple):
    """What a rank has encoded, and still needs once it is sent."""

    wires: Tensor
    """(size, bytes), without the own row."""
    own: Tensor | None
    """The own row, if `out` does not hold it multiplied by alpha: 16 bits are too coarse for that."""
    work: Tensor | None = None
    """With feedback: the rows that were encoded, (size, n)."""
    residual: Tensor | None = None


def encode_rows(
    coded: Coded, rows: Tensor, out: Tensor, bucket: Bucket, comm: Comm, alpha: float, residual: Tensor | None = None
) -> Sent:
    """The first half of `scatter_`: afterwards `rows` is not needed. `residual` is a copy to work in."""
    whole, work = coded.plan(bucket, 1), rows if residual is None else _sum(rows, residual)
    (part,), wires = whole.parts, _room((comm.size, whole.wire_bytes), _wide_bytes(out, whole), rows.device)
    space = None
    if widens(work, coded.codec):
        space = _room((_wide_bytes(work, whole),), wires.nbytes, rows.device).view(torch.float32)
    for rank in range(comm.size):
        if rank != comm.rank:
            encode_part(_seeded(coded, bucket, comm.rank, rank), work[rank], part, wires[rank], space)
    if space is not None:
        release(space)
    own = _keep_own(out, work[comm.rank], alpha, stays=residual is not None)
    return Sent(wires, own) if residual is None else Sent(wires, own, work, residual)


def _keep_own(out: Tensor, row: Tensor, alpha: float, stays: bool) -> Tensor | None:
    """Put what the own row adds to the sum into `out`; the row itself if that cannot hold it. `stays`: it is a copy."""
    if out.dtype.itemsize >= 4:
        out.copy_(row).mul_(alpha)
        return None
    return out.copy_(row) if out.dtype == row.dtype else row if stays else row.clone()


def add_arrived_(coded: Coded, sent: Sent, out: Tensor, bucket: Bucket, comm: Comm, alpha: float) -> Tensor | None:
    """The second half of `scatter_`: send, and add what arrives to `out`.

    With feedback, the residual becomes what the encoding has lost. The result is then whether the sums of all ranks are
    finite, and otherwise None. If they are not, the old residual must be kept.
    """
    whole, (wires, own, work, residual) = coded.plan(bucket, 1), sent
    arrived, (part,) = comm.all_to_all(wires), whole.parts
    if residual is None:
        release(wires)
    others = [wire for rank, wire in enumerate(arrived) if rank != comm.rank]
    if own is None:
        for wire in others:
            decode_part_(coded.codec, out, part, wire, alpha=alpha, add=True)
    else:
        space = empty((_wide_bytes(out, whole) // 4,), torch.float32, out.device)
        add_narrow_(coded.codec, out, part, own, others, alpha, space)
    if residual is None or work is None:
        return None
    _keep_lost_(coded.codec, work, part, wires, comm.rank)
    if work is not residual:
        residual.copy_(work)
    seen = comm.all_gather(finite(out).to(torch.int32).reshape(1))  # a rank has seen its own sum only
    residual.nan_to_num_(0.0, 0.0, 0.0)  # inf would stay for ever
    return seen.all()


def _keep_lost_(codec: Codec, work: Tensor, part: Part, wires: Tensor, own: int) -> None:
    """Replace the rows by what their encoding has lost."""
    for rank, (row, wire) in enumerate(zip(work, wires, strict=True)):
        if rank == own:
            row.zero_()
            continue
        keep_loss_(codec, row, part, wire, row)
        for start, numel in part.exempt:
            row.narrow(0, start, numel).zero_()


def _sum(rows: Tensor, residual: Tensor) -> Tensor:
    """In place of the residual in float32, or in work space in float64 for float64 gradients."""
    if rows.dtype == torch.float64:
        return torch.add(rows, residual, out=empty(rows.shape, rows.dtype, rows.device))
    return residual.add_(rows)


def gather_(coded: Coded, rows: Tensor, bucket: Bucket, comm: Comm) -> None:
    """Fill `rows`, (size, n), with the decoded row of every rank. The own one must be there, and is decoded too.

    So all ranks hold the same bits for the same parameter, the owner among them.
    """
    whole = coded.plan(bucket, 1)
    (part,), wires = whole.parts, comm.rows(whole.wire_bytes, torch.uint8, rows.device)
    space = None
    if widens(rows, coded.codec):
        space = empty((_wide_bytes(rows, whole) // 4,), torch.float32, rows.device)
    encode_part(coded.codec, rows[comm.rank], part, wires[comm.rank], space)
    for row, wire in zip(rows, comm.all_gather_(wires), strict=True):
        if space is None:
            decode_part_(coded.codec, row, part, wire)
        else:
            decode_narrow_(coded.codec, row, part, wire, space)


def _wide_bytes(like: Tensor, whole: WirePlan) -> int:
    """The largest tensor of 16-bit values in float32; 0 for wider values. Tensors are widened one after the other."""
    return 4 * max((piece.numel for piece in whole.parts[0].pieces), default=0) if like.dtype.itemsize < 4 else 0


def _room(shape: Sequence[int], least_bytes: int, device: torch.device) -> Tensor:
    """Work space for bytes, in a block that something else of `least_bytes` can use after its release."""
    nbytes = math.prod(shape)
    return empty((max(nbytes, least_bytes),), torch.uint8, device)[:nbytes].view(shape)


def _seeded(coded: Coded, bucket: Bucket, rank: int, row: int) -> Codec:
    """The codec, with a seed of its own for every rank, row, step and chunk if it rounds stochastically."""
    if not coded.codec.is_random or not bucket.segments:
        return coded.codec
    first = bucket.segments[0]
    return coded.codec.seeded(rank, row, bucket.step, first.name, first.start)


# -- their references -------------------------------------------------------------------------------------------------


def scatter_reference(
    coded: Coded, everyone: Sequence[Tensor], bucket: Bucket, alpha: float, residuals: Sequence[Tensor] | None = None
) -> Reference:
    """What `scatter_` must give on all ranks together, from the `rows` of all ranks, tensor by tensor.

    Returns:
        The results of the ranks one after another, (size, n) in the type of the rows, and the new residual of each.
    """
    size = len(everyone)
    wide = torch.float64 if everyone[0].dtype == torch.float64 else torch.float32
    values = [rows.to(wide) if residuals is None else rows.to(wide) + residuals[i] for i, rows in enumerate(everyone)]
    total, lost = torch.zeros(everyone[0].shape, dtype=wide), [torch.zeros(rows.shape) for rows in everyone]
    for owner in range(size):
        codecs = [_seeded(coded, bucket, rank, owner) for rank in range(size)]
        for where, exempt in _tensors(coded, bucket):
            total[owner, where] = values[owner][owner, where] * alpha
            for rank in (rank for rank in range(size) if rank != owner):
                sent = values[rank][owner, where]
                total[owner, where] += sent.float() * alpha if exempt else _decoded(codecs[rank], sent, alpha)
                lost[rank][owner, where] = 0.0 if exempt else sent - _decoded(codecs[rank], sent)
    total = total.to(everyone[0].dtype)
    return Reference(total, torch.zeros(()), kept(total, residuals, lost))


def gather_reference(coded: Coded, rows: Tensor, bucket: Bucket) -> Tensor:
    """What `gather_` must give, from the exact rows of all ranks: each tensor through the codec by itself."""
    result = rows.clone()
    for row in result:
        for where, exempt in _tensors(coded, bucket):
            row[where] = row[where].float() if exempt else _decoded(coded.codec, row[where])
    return result


def _decoded(codec: Codec, values: Tensor, alpha: float = 1.0) -> Tensor:
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    return codec.decode_(torch.empty(values.shape, dtype=wide), codec.encode(values.contiguous()), alpha=alpha)


def _tensors(coded: Coded, bucket: Bucket) -> list[tuple[slice, bool]]:
    """Where each run of values that are coded together lies in a row, and whether it travels in float32."""
    runs = joined(coded.runs(bucket), coded.codec)
    ends = list(itertools.accumulate(run.numel for run in runs))
    return [(slice(end - run.numel, end), run.exempt) for run, end in zip(runs, ends, strict=True)]
