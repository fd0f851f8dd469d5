"""Averaging through a codec: who averages which part of a bucket, and the two ways over the wire.

    part   [ wire of a tensor's values ][ wire of the next tensor's ] ... [ exempt values, float32 ][ padding ]

One-shot has a single part, two-shot one part per rank. A block of a codec never holds values of two runs. Tensors
that are exempt from coding travel in the same message in float32.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, new_total
from gradwire.exchanges.base import Comm
from gradwire.kernels.batch import Entry
from gradwire.kernels.memory import empty


class Run(NamedTuple):
    """Adjacent values of a bucket that are treated alike."""

    numel: int
    exempt: bool


class Piece(NamedTuple):
    """Values of one tensor, and where their wire is within the part's."""

    start: int
    numel: int
    at: int
    wire_bytes: int


class Part(NamedTuple):
    """What one rank averages."""

    pieces: tuple[Piece, ...]
    exempt: tuple[tuple[int, int], ...]
    """(start, numel) of the values that travel in float32."""
    exempt_at: int
    """Where they begin on the wire."""

    @property
    def exempt_numel(self) -> int:
        """The number of values that travel in float32."""
        return sum(numel for _, numel in self.exempt)


class WirePlan(NamedTuple):
    """All parts of a bucket, and the length of a part's wire: the same for all."""

    parts: tuple[Part, ...]
    wire_bytes: int


def plan(runs: tuple[Run, ...], parts: int, codec: Codec) -> WirePlan:
    """Distribute the tensors of a bucket over `parts` ranks, in equal shares of whole blocks."""
    if torch.compiler.is_compiling():  # dynamo does not trace caches
        return _plan(runs, parts, codec)
    return _kept_plan(runs, parts, codec)


def joined(runs: Sequence[Run], codec: Codec) -> tuple[Run, ...]:
    """What is coded together: a tensor, or neighbours that are each smaller than a block and so share blocks.

    If the codec has no blocks, neighbours are always one run, and so are those that travel in float32. A run whose wire
    would be longer than its values in float32 travels as those.
    """
    shortest = [
        Run(run.numel, run.exempt or codec.wire_bytes(run.numel) > 4 * run.numel) for run in _side_by_side(runs, codec)
    ]
    return tuple(_side_by_side(shortest, codec))


def _side_by_side(runs: Iterable[Run], codec: Codec) -> list[Run]:
    """Join neighbours of the same kind, unless each has blocks of its own."""
    found: list[Run] = []
    before = False, False
    for run in runs:
        kind = run.exempt, run.exempt or codec.align == 1 or run.numel < codec.align
        if found and kind == before and kind[1]:
            found[-1] = Run(found[-1].numel + run.numel, run.exempt)
        else:
            found.append(run)
        before = kind
    return found


def _plan(runs: tuple[Run, ...], parts: int, codec: Codec) -> WirePlan:
    runs = joined(runs, codec)
    coded, exempt = _deal(runs, False, parts, codec.align), _deal(runs, True, parts, 1)
    made = tuple(_part(pieces, rest, codec) for pieces, rest in zip(coded, exempt, strict=True))
    return WirePlan(made, max(part.exempt_at + 4 * part.exempt_numel for part in made))


_kept_plan = lru_cache(maxsize=4096)(_plan)


def _deal(runs: Sequence[Run], exempt: bool, parts: int, align: int) -> list[list[tuple[int, int]]]:
    """The (start, numel) pairs of each part, of the exempt runs or of the others."""
    units = sum(-(-run.numel // align) for run in runs if run.exempt == exempt)
    share = max(1, -(-units // parts))
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    start, unit = 0, 0
    for run in runs:
        at = 0
        while run.exempt == exempt and at < run.numel:
            part = unit // share
            numel = min(run.numel - at, (share * (part + 1) - unit) * align)
            dealt[part].append((start + at, numel))
            at, unit = at + numel, unit - (-numel // align)
        start += run.numel
    return dealt


def _part(coded: list[tuple[int, int]], exempt: list[tuple[int, int]], codec: Codec) -> Part:
    pieces, at = [], 0
    for start, numel in coded:
        pieces.append(Piece(start, numel, at, codec.wire_bytes(numel)))
        at += pieces[-1].wire_bytes
    return Part(tuple(pieces), tuple(exempt), at)


@lru_cache(maxsize=4096)
def entries(plan: WirePlan, rows: tuple[tuple[int, int], ...]) -> tuple[Entry, ...]:
    """The tensors of some parts for `Codec.batch`: (part, row of the wires that it is in) for each."""
    found = []
    for number, row in rows:
        part, at = plan.parts[number], row * plan.wire_bytes
        found += [Entry(piece.start, piece.numel, at + piece.at, False) for piece in part.pieces]
        at += part.exempt_at
        for start, numel in part.exempt:
            found.append(Entry(start, numel, at, True))
            at += 4 * numel
    return tuple(found)


def encode_part(codec: Codec, flat: Tensor, part: Part, wire: Tensor, space: Tensor | None = None) -> None:
    """Write the wire of one part of `flat`; `space`: in float32, where each tensor is copied to be encoded."""
    for piece in part.pieces:
        values = _values(flat, piece)
        codec.encode(values if space is None else space[: piece.numel].copy_(values), out=_wire(wire, piece))
    _put(wire, part, _exempt(flat, part))


def decode_part_(
    codec: Codec, flat: Tensor, part: Part, wire: Tensor, *, alpha: float = 1.0, add: bool = False
) -> None:
    """`flat = alpha * values`, or `flat += alpha * values`, within one part."""
    for piece in part.pieces:
        codec.decode_(_values(flat, piece), _wire(wire, piece), alpha=alpha, add=add)
    if part.exempt:
        _spread_(flat, part, _travelled(wire, part) * alpha, add)


def decode_narrow_(codec: Codec, flat: Tensor, part: Part, wire: Tensor, space: Tensor) -> None:
    """`flat = values`, of 16 bits, within one part. Each tensor is decoded in `space`, in float32."""
    for piece in part.pieces:
        _values(flat, piece).copy_(codec.decode_(space[: piece.numel], _wire(wire, piece)))
    if part.exempt:
        _spread_(flat, part, _travelled(wire, part), False)


def add_narrow_(
    codec: Codec, flat: Tensor, part: Part, own: Tensor, wires: Sequence[Tensor], alpha: float, space: Tensor
) -> None:
    """`flat = alpha * (own + values of all wires)`, of 16 bits, within one part. `space` is in float32 or float64."""
    for piece in part.pieces:
        total = space[: piece.numel].copy_(_values(own, piece)).mul_(alpha)
        for wire in wires:
            codec.decode_(total, _wire(wire, piece), alpha=alpha, add=True)
        _values(flat, piece).copy_(total)
    values = _exempt(own, part)
    if values is not None:
        _spread_(flat, part, _total([values, *(_travelled(wire, part) for wire in wires)], alpha), False)


def sum_part_(codec: Codec, flat: Tensor, part: Part, wires: Tensor, alpha: float) -> None:
    """`flat = alpha * (values of all wires)`, in the order of the wires, within one part."""
    for piece in part.pieces:
        codec.sum_(_values(flat, piece), wires.narrow(1, piece.at, piece.wire_bytes), alpha)
    if part.exempt:
        scaled = _all_travelled(wires, part) * alpha
        total = scaled[0]
        for rank in range(1, len(scaled)):
            total.add_(scaled[rank])
        _spread_(flat, part, total, False)


def reduce_part(codec: Codec, flat: Tensor, part: Part, wires: Tensor, own: int, alpha: float, wire: Tensor) -> None:
    """Write the wire of `alpha * (flat + values of all wires but `own`)`, within one part."""
    for piece in part.pieces:
        others = wires.narrow(1, piece.at, piece.wire_bytes)
        codec.reduce_(_wire(wire, piece), _values(flat, piece), others, own, alpha)
    _put(wire, part, _exempt_total(flat, part, wires, own, alpha))


def reduce_part_keeping_loss(
    codec: Codec, flat: Tensor, part: Part, wires: Tensor, own: int, size: int, wire: Tensor, residual: Tensor
) -> None:
    """Like `reduce_part` for the mean over `size` ranks; what the encoding lost goes to `residual`, undivided."""
    for piece in part.pieces:
        here, others = _wire(wire, piece), wires.narrow(1, piece.at, piece.wire_bytes)
        mean = codec.reduced(_values(flat, piece), others, own, 1.0 / size)
        codec.encode(mean, out=here)
        _values(residual, piece).copy_(codec.decode_(mean, here, alpha=-1.0, add=True)).mul_(size)
    _put(wire, part, _exempt_total(flat, part, wires, own, 1.0 / size))


def keep_loss_(codec: Codec, flat: Tensor, part: Part, wire: Tensor, residual: Tensor) -> None:
    """`residual = flat - values of the wire`, within one part; values that travel in float32 lose nothing."""
    for piece in part.pieces:
        codec.decode_(_values(residual, piece).copy_(_values(flat, piece)), _wire(wire, piece), alpha=-1.0, add=True)


def _values(flat: Tensor, piece: Piece) -> Tensor:
    return flat.narrow(0, piece.start, piece.numel)


def _wire(wire: Tensor, piece: Piece) -> Tensor:
    return wire.narrow(0, piece.at, piece.wire_bytes)


def _exempt(flat: Tensor, part: Part) -> Tensor | None:
    if not part.exempt:
        return None
    values = [flat.narrow(0, start, numel) for start, numel in part.exempt]
    return (values[0] if len(values) == 1 else torch.cat(values)).float()


def _exempt_total(flat: Tensor, part: Part, wires: Tensor, own: int, alpha: float) -> Tensor | None:
    values = _exempt(flat, part)
    if values is None:
        return None
    others = [_travelled(wire, part) for rank, wire in enumerate(wires) if rank != own]
    return _total([values, *others], alpha)


def _total(values: Sequence[Tensor], alpha: float) -> Tensor:
    total = values[0] * alpha
    for other in values[1:]:
        total.add_(other * alpha)
    return total


def _travelled(wire: Tensor, part: Part) -> Tensor:
    return wire.narrow(0, part.exempt_at, 4 * part.exempt_numel).view(torch.float32)


def _all_travelled(wires: Tensor, part: Part) -> Tensor:
    return wires.narrow(1, part.exempt_at, 4 * part.exempt_numel).view(torch.float32)


def _put(wire: Tensor, part: Part, values: Tensor | None) -> None:
    if values is not None:
        _travelled(wire, part).copy_(values)


def _spread_(flat: Tensor, part: Part, values: Tensor, add: bool) -> None:
    at = 0
    for start, numel in part.exempt:
        there, new = flat.narrow(0, start, numel), values.narrow(0, at, numel)
        there.add_(new) if add else there.copy_(new)
        at += numel


def new_wires(plan: WirePlan, like: Tensor) -> Tensor:
    """Work space for the wires of all parts, (parts, bytes)."""
    return empty((len(plan.parts), plan.wire_bytes), torch.uint8, like.device)


# -- the two ways over the wire ----------------------------------------------------------------------------------


def one_shot_(flat: Tensor, whole: WirePlan, codec: Codec, comm: Comm, residual: Tensor | None = None) -> None:
    """Every rank sends everything once: the least error, and at 2 ranks no more bytes than two-shot.

    Averages in place; `whole` has a single part. 1. Encode.  2. All-gather the wires.  3. Every rank decodes all wires
    in the order of the ranks and averages them.
    """
    (part,), wires = whole.parts, comm.rows(whole.wire_bytes, torch.uint8, flat.device)
    wire, batch = wires[comm.rank], codec.batch(flat)
    if batch is None or not batch.encode_(wires, flat, entries(whole, ((0, comm.rank),)), residual):
        encode_part(codec, flat, part, wire)
        if residual is not None:
            keep_loss_(codec, flat, part, wire, residual.zero_())
    wires = comm.all_gather_(wires)
    if batch is not None and batch.total_(flat, entries(whole, ((0, 0),)), wires, 1.0 / comm.size, comm.size):
        return
    total = new_total(flat) if flat.dtype.itemsize < 4 else flat  # 16 bits are too coarse to add up in
    sum_part_(codec, total, part, wires, 1.0 / comm.size)
    if total is not flat:
        flat.copy_(total)


def two_shot_(flat: Tensor, split: WirePlan, codec: Codec, comm: Comm, residual: Tensor | None = None) -> None:
    """Each rank averages one part for all, so the bytes that a rank sends do not grow with the number of ranks.

        rank 0  [ part 0 | part 1 | part 2 ]     all-to-all     rank r holds every rank's part r
        rank 1  [ part 0 | part 1 | part 2 ]   ------------->   and averages them in float32
        rank 2  [ part 0 | part 1 | part 2 ]     all-gather     the averages go back to all ranks

    Averages in place; `split` has one part per rank. 1. Encode each part for its owner; the own part stays as it is.
    2. All-to-all.  3. Sum in float32.  4. Encode the mean.  5. All-gather.  6. Decode, the own part too, so that all
    ranks hold the same bits.
    """
    wires, own, batch = new_wires(split, flat), split.parts[comm.rank], codec.batch(flat)
    rows = tuple((rank, rank) for rank in range(comm.size))
    others = rows[: comm.rank] + rows[comm.rank + 1 :]
    if batch is None or not batch.encode_(wires, flat, entries(split, others), residual):
        for rank, _ in others:
            encode_part(codec, flat, split.parts[rank], wires[rank])
        if residual is not None:
            residual.zero_()
            for rank, _ in others:
                keep_loss_(codec, flat, split.parts[rank], wires[rank], residual)

    arrived, means = comm.all_to_all(wires), comm.rows(split.wire_bytes, wires.dtype, flat.device)
    mean, alpha, mine = means[comm.rank], 1.0 / comm.size, ((comm.rank, 0),)
    if batch is None or not batch.reduce_(means, flat, entries(split, mine), arrived, comm.rank, alpha, residual):
        if residual is None:
            reduce_part(codec, flat, own, arrived, comm.rank, alpha, mean)
        else:
            reduce_part_keeping_loss(codec, flat, own, arrived, comm.rank, comm.size, mean, residual)

    means = comm.all_gather_(means)
    if batch is None or not batch.total_(flat, entries(split, rows), means, 1.0, 1):
        for part, wire in zip(split.parts, means, strict=True):
            decode_part_(codec, flat, part, wire)
