"""The Triton kernels: a few passes that serve every codec, for one tensor or for all tensors of a message.

    reduce   wire = encode(alpha * values + alpha * (values of other wires)); without other wires it only encodes
    total    values = alpha * (values of the wires), or += that
    tops     the largest magnitude of each program's share of what `reduce` will encode, for fp16
    scaled   casts under factors, for fp16 without its wire

With `TABLE`, program p reads row p of the table (see `gradwire.kernels.triton.table`): which values it works on, and
where their wire is. Rows of exempt tensors, which travel in float32, are marked by a negative tile.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton.bits import (
    INFINITE,
    bf16_of,
    float_of,
    from_bf16,
    load_tile,
    magnitude_of,
    places,
    store_tile,
    typed,
)
from gradwire.kernels.triton.blocks import decode_blocks, decode_largest, encode_blocks, encode_largest
from gradwire.kernels.triton.coding import BF16, FP16, LEVELS, TOPK
from gradwire.kernels.triton.tiles import decode_tile, encode_tile

NUMBERS = ["numel", "stride", "others", "skip", "wires_at", "wire_at", "seed"]
"""Arguments that no kernel is compiled anew for."""


@triton.jit(do_not_specialize=NUMBERS)
def reduce(
    values,
    wires,
    wire,
    residual,
    largest,
    table,
    numel,
    stride,
    others,
    skip,
    wire_at,
    alpha,
    size,
    seed,
    C: tl.constexpr,
    TABLE: tl.constexpr,
    KEEP: tl.constexpr,
    ALIGN: tl.constexpr,
    WIRE_ALIGN: tl.constexpr,
):
    """Encode; with `KEEP`, `residual = size * (what the encoding lost)`."""
    start, numel, at, tile, left = _share(table, numel, TABLE, ALIGN, C)
    to = tl.multiple_of(at + wire_at, WIRE_ALIGN)
    x = load_tile(values, start, left, C.rows, C.block) * alpha
    if tile < 0:
        x = _add_exempt(x, wires, at, ~tile, left, stride, others, skip, alpha, WIRE_ALIGN, C)
        store_tile(typed(wire, to, tl.float32), ~tile * (C.rows * C.block), left, x, C.rows, C.block)
        if KEEP:
            store_tile(residual, start, left, tl.zeros([C.rows, C.block], tl.float32), C.rows, C.block)
    else:
        x = _add_coded(x, wires, at, tile, numel, stride, others, skip, alpha, WIRE_ALIGN, C)
        if others > 0:
            x = tl.where(places(C.rows, C.block) < left, x, 0.0)  # what the padding of the wires came to
        if TABLE and (C.kind == BF16 or C.kind == FP16):
            left += left & 1  # a zero behind an odd number of values; for a single tensor, the caller writes it
        lost = x - _encoded(x, wire, to, tile, numel, left, seed, largest, C)
        if KEEP:
            store_tile(
                residual, start, tl.minimum(left, numel - tile * (C.rows * C.block)), lost * size, C.rows, C.block
            )


@triton.jit(do_not_specialize=NUMBERS)
def total(
    values,
    wires,
    table,
    numel,
    stride,
    others,
    wires_at,
    alpha,
    C: tl.constexpr,
    TABLE: tl.constexpr,
    ADD: tl.constexpr,
    ALIGN: tl.constexpr,
    WIRE_ALIGN: tl.constexpr,
):
    """Decode and add up, in the order of the wires and in float32."""
    start, numel, at, tile, left = _share(table, numel, TABLE, ALIGN, C)
    at += wires_at
    if ADD:
        x = load_tile(values, start, left, C.rows, C.block)
    else:
        x = tl.full([C.rows, C.block], 0.0 if C.kind == TOPK else -0.0, tl.float32)
    if tile < 0:
        if not ADD:
            x = tl.full([C.rows, C.block], -0.0, tl.float32)  # -0 + x is x, for every x
        x = _add_exempt(x, wires, at, ~tile, left, stride, others, others, alpha, WIRE_ALIGN, C)
    else:
        x = _add_coded(x, wires, at, tile, numel, stride, others, others, alpha, WIRE_ALIGN, C)
    store_tile(values, start, left, x, C.rows, C.block)


@triton.jit(do_not_specialize=NUMBERS)
def tops(
    values,
    wires,
    sums,
    largest,
    table,
    numel,
    stride,
    others,
    skip,
    alpha,
    C: tl.constexpr,
    TABLE: tl.constexpr,
    KEEP: tl.constexpr,
    ALIGN: tl.constexpr,
    WIRE_ALIGN: tl.constexpr,
):
    """The bit pattern of each program's largest magnitude; with `KEEP`, the sum goes to `sums`."""
    start, numel, at, tile, left = _share(table, numel, TABLE, ALIGN, C)
    x = load_tile(values, start, left, C.rows, C.block) * alpha
    if tile < 0:
        x = _add_exempt(x, wires, at, ~tile, left, stride, others, skip, alpha, WIRE_ALIGN, C)
    else:
        x = _add_coded(x, wires, at, tile, numel, stride, others, skip, alpha, WIRE_ALIGN, C)
    x = tl.where(places(C.rows, C.block) < left, x, 0.0)
    if KEEP:
        store_tile(sums, start, left, x, C.rows, C.block)
    tl.store(largest + tl.program_id(0), tl.max(magnitude_of(x)))


@triton.jit(do_not_specialize=NUMBERS)
def scaled(
    out,
    own,
    rows,
    factors,
    numel,
    stride,
    others,
    skip,
    alpha,
    ADD: tl.constexpr,
    OWN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """`out = rows * factors`, added up over all rows but one; plus `out` with `ADD`, plus `alpha * own` with `OWN`."""
    done = tl.program_id(0).to(tl.int64) * SIZE
    left = tl.minimum(numel - done, SIZE).to(tl.int32)
    if ADD:
        x = load_tile(out, done, left, 1, SIZE)
    elif OWN:
        x = load_tile(own, done, left, 1, SIZE) * alpha
    else:
        x = tl.full([1, SIZE], -0.0, tl.float32)
    for i in range(others):
        row = i + (i >= skip).to(tl.int64)
        x += load_tile(rows, row * stride + done, left, 1, SIZE) * tl.load(factors + row)
    store_tile(out, done, left, x, 1, SIZE)


@triton.jit
def _share(table, numel, TABLE: tl.constexpr, ALIGN: tl.constexpr, C: tl.constexpr):
    """This program's share: the first value, and of its tensor the number of values, the wire, and the tile."""
    program = tl.program_id(0).to(tl.int64)
    start, at, tile, count = program * 0, program * 0, program, program * 0 + numel
    if TABLE:
        row = table + program * 4
        start, count, at, tile = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    done = tl.where(tile < 0, ~tile, tile) * (C.rows * C.block)
    left = tl.minimum(count - done, C.rows * C.block).to(tl.int32)
    return tl.multiple_of(start + done, ALIGN), count, at, tile, left


@triton.jit
def _add_exempt(x, wires, at, tile, left, stride, others, skip, alpha, WIRE_ALIGN: tl.constexpr, C: tl.constexpr):
    for i in range(others):
        there = tl.multiple_of(at + (i + (i >= skip).to(tl.int64)) * stride, WIRE_ALIGN)
        row = typed(wires, there, tl.float32)
        x += load_tile(row, tile * (C.rows * C.block), left, C.rows, C.block) * alpha
    return x


@triton.jit
def _add_coded(x, wires, at, tile, numel, stride, others, skip, alpha, WIRE_ALIGN: tl.constexpr, C: tl.constexpr):
    """Add `alpha` times the values of `others` wires, all but the one at `skip`."""
    for i in range(others):
        there = tl.multiple_of(at + (i + (i >= skip).to(tl.int64)) * stride, WIRE_ALIGN)
        x += _decoded(wires, there, tile, numel, alpha, C)
    return x


@triton.jit
def _decoded(wire, at, tile, numel, alpha, C: tl.constexpr):
    if C.kind == LEVELS:
        return decode_tile(wire, at, tile, numel, alpha, C)
    elif C.kind == TOPK:
        return decode_largest(wire, at, tile, numel, alpha, C)
    elif C.kind == BF16:
        return from_bf16(_halves(wire, at, tile, numel, tl.uint16, C)) * alpha
    elif C.kind == FP16:
        scale = tl.load(typed(wire, at, tl.float32))
        return _halves(wire, at + 4, tile, numel, tl.float16, C).to(tl.float32) * (scale * alpha)
    else:
        return decode_blocks(wire, at, tile, numel, alpha, C)


@triton.jit
def _encoded(x, wire, at, tile, numel, left, seed, largest, C: tl.constexpr):
    """Write the wire of `x`; returns the values on the wire."""
    if C.kind == LEVELS:
        return encode_tile(x, wire, at, tile, numel, seed, C)
    elif C.kind == TOPK:
        return encode_largest(x, wire, at, tile, numel, C)
    elif C.kind == BF16:
        bits = bf16_of(x)
        _store_halves(wire, at, tile, left, bits, C)
        return from_bf16(bits)
    elif C.kind == FP16:
        scale = _half_scale(largest + (tl.program_id(0) - tile), tl.cdiv(numel, C.rows * C.block))
        half = (x * tl.div_rn(1.0, scale)).to(tl.float16)
        _store_halves(wire, at + 4, tile, left, half, C)
        tl.store(typed(wire, at, tl.float32), scale, mask=tile == 0)
        return half.to(tl.float32) * scale
    else:
        return encode_blocks(x, wire, at, tile, numel, seed, C)


@triton.jit
def _halves(wire, at, tile, numel, KIND: tl.constexpr, C: tl.constexpr):
    done = tile * (C.rows * C.block)
    place, there = places(C.rows, C.block), typed(wire, at, KIND) + done
    if numel - done >= C.rows * C.block:
        x = tl.load(there + place)
    else:
        x = tl.load(there + place, mask=place < numel - done, other=0)
    return x


@triton.jit
def _store_halves(wire, at, tile, left, x, C: tl.constexpr):
    there = typed(wire, at, tl.float16 if C.kind == FP16 else tl.uint16)
    store_tile(there, tile * (C.rows * C.block), left, x, C.rows, C.block)


@triton.jit(do_not_specialize=["programs"])
def half_scale(scale, largest, programs):
    """The scale of a tensor, from what `tops` found in it."""
    tl.store(scale, _half_scale(largest, programs))


@triton.jit
def _half_scale(first, programs):
    """See `gradwire.kernels.torch.half.half_scale`."""
    top = tl.zeros([128], tl.int32)
    for i in range(0, programs, 128):
        place = i + tl.arange(0, 128)
        top = tl.maximum(top, tl.load(first + place, mask=place < programs, other=0))
    most = tl.max(top)
    exponent = tl.maximum((most >> 23) - 126, -111)
    exponent = tl.where(most == 0, 0, exponent)
    return tl.where(most >= INFINITE, 1.0, float_of((exponent + 112) << 23))
