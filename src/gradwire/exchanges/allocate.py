"""Bit allocation: blocks that carry more of the gradient get more bits, for the same number of bytes in total.

1. Past averages tell how much energy each block of 256 values has. They are the same on all ranks, so this
   needs no collective.
2. The best widths are c + log2(energy) / 2, with c such that the total is right (reverse water-filling).
3. Blocks are distributed to the ranks round-robin, so that every rank gets wide and narrow ones.
4. Within a part the blocks of one width are coded together: sign for 1 bit, int2 to int6, int8.

All arithmetic is on integers or in a fixed order, so that ranks on different processors agree to the bit.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import Codec, Int2, Int3, Int4, Int5, Int6, Int8, Sign
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket, Segment
from gradwire.exchanges.reference import Reference, coded_mean, coded_message
from gradwire.kernels.torch.bits import tree_sum

BLOCK = 256
KEEP = 0.8
"""The weight of the past in the moving average of the energy."""
LARGEST = torch.finfo(torch.float32).max
CODECS: dict[int, Any] = {1: Sign(), 2: Int2(), 3: Int3(), 4: Int4(), 5: Int5(), 6: Int6(), 8: Int8()}
_UNIT = 512
"""Widths are computed in 512ths of a bit."""


class Share(NamedTuple):
    """The blocks of one part that have the same width, and where their wire is."""

    codec: Codec
    rows: Tensor
    at: int
    wire_bytes: int


class Allocation(NamedTuple):
    """All shares of all parts, and the length of a part's wire."""

    parts: tuple[tuple[Share, ...], ...]
    coded_bytes: int
    extra: int
    """The number of exempt values that a part carries behind its shares, as float32."""

    @property
    def wire_bytes(self) -> int:
        """Shares and exempt values."""
        return self.coded_bytes + 4 * self.extra


def allocated_mean_(bucket: Bucket, comm: Comm, bits: int, fairness: float, exempt: Sequence[bool], one: bool) -> None:
    """Average a bucket in place: one-shot, or two-shot with a part for every rank."""
    coded = [segment for segment, out in zip(bucket.segments, exempt, strict=True) if not out]
    x_BK, rest = _split(bucket, exempt)
    energies = [_energy(bucket, segment) for segment in coded]
    widths = widths_of(torch.cat(energies), bits, fairness) if energies else torch.empty(0, dtype=torch.int64)
    layout = _lay_out(widths, 1 if one else comm.size, rest.numel())
    spare = torch.zeros(len(layout.parts) * layout.extra)
    spare.narrow(0, 0, rest.numel()).copy_(rest)
    (_one_shot_ if one else _two_shot_)(x_BK, spare, layout, comm)
    _join_(bucket, exempt, x_BK, spare)
    _remember(bucket, coded, x_BK)


def allocated_reference(
    buckets: Sequence[Bucket], bits: int, fairness: float, exempt: Sequence[bool], one: bool
) -> Reference:
    """The result of `allocated_mean_`, bit for bit. It shares the choice of the widths, and no coding or summing."""
    first, size = dataclasses.replace(buckets[0], flat=buckets[0].flat.clone()), len(buckets)
    coded = [segment for segment, out in zip(first.segments, exempt, strict=True) if not out]
    blocks, rests = zip(*(_split(bucket, exempt) for bucket in buckets), strict=True)
    energies = [_energy(first, segment) for segment in coded]
    widths = widths_of(torch.cat(energies), bits, fairness) if energies else torch.empty(0, dtype=torch.int64)
    mean_BK, rest = torch.zeros_like(blocks[0]), coded_message(rests, [rests[0].numel()], [True], [Int8()], one)[0]
    order = torch.arange(widths.numel())
    for part in range(1 if one else size):
        for width, codec in CODECS.items():
            rows = order[(order % (1 if one else size) == part) & (widths == width)]
            values = [x_BK[rows].view(-1) for x_BK in blocks]
            mean_BK[rows] = coded_mean(values, [codec] * size, None if one else part)[0].view(-1, BLOCK)
    _join_(first, exempt, mean_BK, rest)
    _remember(first, coded, mean_BK)
    return Reference(first.flat, torch.zeros(()))


def widths_of(energy: Tensor, bits: int, fairness: float) -> Tensor:
    """A width from 1 to 8 for every block, `bits` on average; `fairness` 1 is best for the total, 0 treats all alike.

    The widths are the same on all ranks where the energies are.
    """
    level = energy.clamp(min=2.0**-120).view(torch.int32).to(torch.int64) >> 19  # 16 * log2, within 3%
    demand = level * round(16 * fairness)
    low, high = -(1 << 20), 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        if int(_rounded(demand + middle).sum()) <= bits * energy.numel():
            low = middle
        else:
            high = middle
    return _rounded(demand + low)


def _rounded(demand: Tensor) -> Tensor:
    widths = ((demand + _UNIT // 2) // _UNIT).clamp(1, 8)
    return torch.where(widths == 7, 6, widths)  # there is no codec of 7 bits


def _lay_out(widths: Tensor, parts: int, exempt: int) -> Allocation:
    made, longest = [], 0
    for part in range(parts):
        rows, at, shares = torch.arange(widths.numel())[part::parts], 0, []
        for width in sorted(set(widths[rows].tolist())):
            chosen, codec = rows[widths[rows] == width], CODECS[width]
            size = codec.wire_bytes(chosen.numel() * BLOCK)
            shares.append(Share(codec, chosen, at, size))
            at += size
        made.append(tuple(shares))
        longest = max(longest, at)
    return Allocation(tuple(made), longest, -(-exempt // parts))


def _one_shot_(x_BK: Tensor, spare: Tensor, layout: Allocation, comm: Comm) -> None:
    wire = torch.zeros(layout.wire_bytes, dtype=torch.uint8)
    _encode(x_BK, spare, 0, layout, wire)
    total, extra = torch.zeros_like(x_BK), torch.zeros_like(spare)
    for row in comm.all_gather(wire):
        _add(total, extra, 0, layout, row, 1.0 / comm.size)
    x_BK.copy_(total)
    spare.copy_(extra)


def _two_shot_(x_BK: Tensor, spare: Tensor, layout: Allocation, comm: Comm) -> None:
    wires = torch.zeros((comm.size, layout.wire_bytes), dtype=torch.uint8)
    for part, wire in enumerate(wires):
        if part != comm.rank:
            _encode(x_BK, spare, part, layout, wire)
    mean, extra = x_BK * (1.0 / comm.size), spare * (1.0 / comm.size)
    for rank, row in enumerate(comm.all_to_all(wires)):
        if rank != comm.rank:
            _add(mean, extra, comm.rank, layout, row, 1.0 / comm.size)
    wire = torch.zeros(layout.wire_bytes, dtype=torch.uint8)
    _encode(mean, extra, comm.rank, layout, wire)
    x_BK.zero_()
    spare.zero_()
    for part, row in enumerate(comm.all_gather(wire)):
        _add(x_BK, spare, part, layout, row, 1.0)


def _encode(x_BK: Tensor, spare: Tensor, part: int, layout: Allocation, wire: Tensor) -> None:
    for share in layout.parts[part]:
        values = x_BK.index_select(0, share.rows).view(-1)
        share.codec.encode(values, out=wire.narrow(0, share.at, share.wire_bytes))
    _spare_of(wire, layout).copy_(spare.narrow(0, part * layout.extra, layout.extra))


def _add(x_BK: Tensor, spare: Tensor, part: int, layout: Allocation, wire: Tensor, alpha: float) -> None:
    for share in layout.parts[part]:
        values = torch.empty(share.rows.numel() * BLOCK)
        share.codec.decode_(values, wire.narrow(0, share.at, share.wire_bytes), alpha=alpha)
        x_BK.index_add_(0, share.rows, values.view(-1, BLOCK))
    spare.narrow(0, part * layout.extra, layout.extra).add_(_spare_of(wire, layout) * alpha)


def _spare_of(wire: Tensor, layout: Allocation) -> Tensor:
    return wire.narrow(0, layout.coded_bytes, 4 * layout.extra).view(torch.float32)


def _blocks(segment: Segment) -> int:
    return -(-segment.numel // BLOCK)


def _split(bucket: Bucket, exempt: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """The coded tensors as rows of 256, each padded with zeros, and the exempt values."""
    pieces = bucket.flat.split([segment.numel for segment in bucket.segments])
    pairs = list(zip(pieces, exempt, strict=True))
    coded = [torch.nn.functional.pad(piece.float(), (0, -piece.numel() % BLOCK)) for piece, out in pairs if not out]
    rest = [piece.float() for piece, out in pairs if out]
    none = torch.empty(0)
    return torch.cat(coded or [none]).view(-1, BLOCK), torch.cat(rest or [none])


def _join_(bucket: Bucket, exempt: Sequence[bool], x_BK: Tensor, spare: Tensor) -> None:
    """The inverse of `_split`: write the values into the bucket."""
    row, at = 0, 0
    pieces = bucket.flat.split([segment.numel for segment in bucket.segments])
    for segment, piece, out in zip(bucket.segments, pieces, exempt, strict=True):
        if out:
            piece.copy_(spare.narrow(0, at, segment.numel))
            at += segment.numel
        else:
            piece.copy_(x_BK.narrow(0, row, _blocks(segment)).view(-1).narrow(0, 0, segment.numel))
            row += _blocks(segment)


def _energy(bucket: Bucket, segment: Segment) -> Tensor:
    """The energy of a segment's blocks in past steps; 1 for all blocks at first.

    Every segment has its own tensor: chunks run in several threads, which must not share one.
    """
    fresh = torch.ones(_blocks(segment))
    if bucket.memory is None:
        return fresh
    kept = bucket.memory.setdefault(segment.name, {})
    return kept.setdefault(f"energy of {segment.numel} from {segment.start}", fresh)


def _remember(bucket: Bucket, coded: Sequence[Segment], x_BK: Tensor) -> None:
    if bucket.memory is None or not torch.isfinite(x_BK).all():
        return
    row = 0
    for segment in coded:
        count, energy = _blocks(segment), _energy(bucket, segment)
        x = x_BK.narrow(0, row, count)
        now = tree_sum(x * x).view(-1).clamp(max=LARGEST) * (1.0 / BLOCK)  # one huge step must not dominate forever
        energy.copy_(torch.where(energy == 1.0, now, energy * KEEP + now * (1 - KEEP)))
        row += count
