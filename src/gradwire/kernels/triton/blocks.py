"""Inside Triton kernels: int8, fp8 and sign, which have one float32 scale per block, and topk.

    encode   (R, K) values -> codes and scales on the wire; returns the values that the codes stand for
    decode   codes and scales on the wire -> (R, K) values times alpha

`wire` and `at` point to the wire of the tensor, `tile` counts the programs of the tensor, and `numel` its values.
"""

import triton
import triton.language as tl

from gradwire.kernels.torch import fp8 as torch_fp8
from gradwire.kernels.torch import int8 as torch_int8
from gradwire.kernels.triton.bits import (
    INFINITE,
    MAGIC,
    bf16_of,
    bits_of,
    float_of,
    from_bf16,
    magnitude_of,
    places,
    tree_sum,
    typed,
    uniform,
    zero_bytes,
)
from gradwire.kernels.triton.coding import FP8, INT8, SIGN

INVERSE_127 = tl.constexpr(torch_int8.INVERSE_127)
INVERSE_448 = tl.constexpr(torch_fp8.INVERSE_LARGEST)
SMALLEST = tl.constexpr(torch_int8.SMALLEST)


@triton.jit
def encode_blocks(x, wire, at, tile, numel, seed, C: tl.constexpr):
    """int8, fp8 and sign."""
    row = tile * C.rows + tl.arange(0, C.rows)
    count = tl.cdiv(numel, C.block)
    if C.kind == SIGN:
        scale, value = _encode_signs(x, wire, at, tile, row, count, numel, C)
    else:
        scale, value = _encode_bytes(x, wire, at, tile, row, count, seed, C)
    tl.store(_scales(wire, at, count, C) + row, scale, mask=row < count)
    return value


@triton.jit
def decode_blocks(wire, at, tile, numel, alpha, C: tl.constexpr):
    """int8, fp8 and sign."""
    row = tile * C.rows + tl.arange(0, C.rows)
    count = tl.cdiv(numel, C.block)
    inside = row < count
    scale = tl.load(_scales(wire, at, count, C) + row, mask=inside, other=0.0) * alpha
    if C.kind == SIGN:
        return _signs_of(wire, at, tile, inside, C) * scale[:, None]
    else:
        codes = wire + at + tile * (C.rows * C.block) + places(C.rows, C.block)
        code = tl.load(codes, mask=inside[:, None], other=0)
        if C.kind == INT8:
            return code.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
        else:
            return _from_fp8(code.to(tl.int32)) * scale[:, None]


@triton.jit
def _scales(wire, at, count, C: tl.constexpr):
    """Where the scales of a tensor lie: behind its codes, at a multiple of 4 bytes."""
    code_bytes = count * C.block
    if C.kind == SIGN:
        code_bytes = tl.cdiv(count * (C.block // 8), 4) * 4
    return typed(wire, tl.multiple_of(at + code_bytes, 4), tl.float32)


@triton.jit
def _encode_bytes(x, wire, at, tile, row, count, seed, C: tl.constexpr):
    top = tl.max(magnitude_of(x), 1)
    finite = top < INFINITE
    inverse_largest: tl.constexpr = INVERSE_448 if C.kind == FP8 else INVERSE_127
    scale = tl.maximum(float_of(tl.where(finite, top, 0)) * inverse_largest, SMALLEST)
    u = tl.where(finite[:, None], x * tl.div_rn(1.0, scale)[:, None], 0.0)
    if C.kind == FP8:
        code = _to_fp8(u)
        value = _from_fp8(code)
    else:
        if C.stochastic:
            drawn = uniform(tile * (C.rows * C.block) + places(C.rows, C.block), seed)
            u = tl.minimum(tl.maximum(tl.floor(u + drawn), -127.0), 127.0)
        shifted = u + MAGIC
        code, value = bits_of(shifted), shifted - MAGIC
    codes = wire + at + tile * (C.rows * C.block) + places(C.rows, C.block)
    tl.store(codes, (code & 0xFF).to(tl.uint8), mask=(row < count)[:, None])
    scale = tl.where(finite, scale, float("nan"))
    return scale, value * scale[:, None]


@triton.jit
def _to_fp8(u):
    """e4m3, by arithmetic on bit patterns: only the newest processors have an instruction for it."""
    pattern, sign = magnitude_of(u), (bits_of(u) >> 24) & 0x80
    pattern = tl.minimum(pattern, 0x43E0_0000)  # 448
    normal = ((pattern + 0x7_FFFF + ((pattern >> 20) & 1)) >> 20) - (120 << 3)
    small = bits_of(float_of(pattern) * 512.0 + MAGIC) & 0xFF
    return tl.where(pattern < 0x3C80_0000, small, normal) | sign  # below 2**-6


@triton.jit
def _from_fp8(code):
    low = code & 0x7F
    normal, small = float_of((low << 20) + (120 << 23)), low.to(tl.float32) * 0.001953125
    size = tl.where(low < 8, small, tl.where(low == 0x7F, float("nan"), normal))
    return float_of(bits_of(size) | ((code >> 7) << 31))


@triton.jit
def _encode_signs(x, wire, at, tile, row, count, numel, C: tl.constexpr):
    eighth: tl.constexpr = C.block // 8
    negative = (bits_of(x) >> 31) & 1
    bit = tl.arange(0, 8)[None, :, None]
    signs = tl.sum(tl.reshape(negative, [C.rows, 8, eighth]) << bit, 1)
    byte = tile * (C.rows * eighth) + places(C.rows, eighth)
    tl.store(wire + at + byte, signs.to(tl.uint8), mask=(row < count)[:, None])
    if C.block < 32:  # the padding before the scales
        zero_bytes(wire, at + count * eighth, tl.where(tile == 0, (4 - count * eighth % 4) % 4, 0))
    present = tl.minimum(tl.maximum(numel - row * C.block, 1), C.block)
    share = tl.div_rn(1.0, present.to(tl.float32))
    scale = tree_sum(tl.abs(x) * share[:, None], C.rows, C.block)
    return scale, tl.where(negative != 0, -scale[:, None], scale[:, None])


@triton.jit
def _signs_of(wire, at, tile, inside, C: tl.constexpr):
    eighth: tl.constexpr = C.block // 8
    byte = tile * (C.rows * eighth) + places(C.rows, eighth)
    signs = tl.load(wire + at + byte, mask=inside[:, None], other=0).to(tl.int32)
    negative = (tl.expand_dims(signs, 1) >> tl.arange(0, 8)[None, :, None]) & 1
    return 1.0 - 2.0 * tl.reshape(negative, [C.rows, C.block]).to(tl.float32)


# -- topk --------------------------------------------------------------------------------------------------------


@triton.jit
def encode_largest(x, wire, at, tile, numel, C: tl.constexpr):
    """topk: the threshold bit by bit, then the values above it and the first of those that equal it."""
    size, row = magnitude_of(x), tile * C.rows + tl.arange(0, C.rows)
    threshold = tl.zeros([C.rows], tl.int32)
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        enough = tl.sum((size >= candidate[:, None]).to(tl.int32), 1) >= C.kept
        threshold = tl.where(enough, candidate, threshold)
    above, equal = size > threshold[:, None], size == threshold[:, None]
    missing = C.kept - tl.sum(above.to(tl.int32), 1)
    so_far = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 1)  # two sums at a time
    equals = so_far >> 16
    chosen = above | (equal & (equals <= missing[:, None]))
    count = tl.cdiv(numel, C.block)
    first = at + 2 * tile * (C.rows * C.kept)
    to = tl.arange(0, C.rows)[:, None] * C.kept + (so_far & 0xFFFF) + tl.minimum(equals, missing[:, None]) - 1
    mask = chosen & (row < count)[:, None]
    place = tl.broadcast_to(tl.arange(0, C.block)[None, :], [C.rows, C.block])
    rounded = bf16_of(x)
    tl.store(typed(wire, first, tl.int16) + to, place.to(tl.int16), mask=mask)
    tl.store(typed(wire, first + 2 * count * C.kept, tl.uint16) + to, rounded, mask=mask)
    return tl.where(chosen, from_bf16(rounded), 0.0)


@triton.jit
def decode_largest(wire, at, tile, numel, alpha, C: tl.constexpr):
    """topk: one value of each block after the other; -0 elsewhere, which changes nothing when it is added."""
    row, count = tile * C.rows + tl.arange(0, C.rows), tl.cdiv(numel, C.block)
    first, second = typed(wire, at, tl.int16), typed(wire, at + 2 * count * C.kept, tl.uint16)
    column = tl.arange(0, C.block)[None, :]
    dense = tl.full([C.rows, C.block], -0.0, tl.float32)
    for i in range(C.kept):
        place = tl.load(first + row * C.kept + i, mask=row < count, other=-1).to(tl.int32)
        value = from_bf16(tl.load(second + row * C.kept + i, mask=row < count, other=0)) * alpha
        dense = tl.where(column == place[:, None], value[:, None], dense)
    return dense
