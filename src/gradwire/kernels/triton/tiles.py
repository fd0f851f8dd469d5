"""Inside Triton kernels: int2 to int6. A program works on a tile of 16 blocks.

`gradwire.kernels.grid` says what is where.
The codes of a tile lie in bit planes whose length depends on the number of blocks in it, so values and codes change
their order between registers (`tl.gather`).
"""

import triton
import triton.language as tl

from gradwire.kernels import grid
from gradwire.kernels.torch.hadamard import norm
from gradwire.kernels.triton.bits import bits_of, float_of, magnitude_of, places, tree_sum, uniform, zero_bytes

REACH = tl.constexpr(grid.REACH)
LAST = tl.constexpr(2.0**126)
NORMS = tl.constexpr(tuple(norm(64 << i) for i in range(3)))


@triton.jit
def encode_tile(x, wire, at, tile, numel, seed, C: tl.constexpr):
    """Write exponent, scales and codes of (16, block) values; returns the values that the codes stand for."""
    tiles, blocks = _sizes(numel, C)
    here = tl.minimum(blocks - 16 * tile, 16).to(tl.int32)
    exponent = tl.maximum(tl.max(magnitude_of(x)) >> 23, 1)
    finite = exponent != 255
    x = tl.where(finite, x, 0.0)
    factor = float_of(tl.where(exponent < 254, (254 - exponent) << 23, 1 << 22))  # 2 ** (127 - exponent)
    if C.hadamard:
        x, factor = rotated(x * factor, C), factor * 0.0 + 1.0
    byte, code = _codes_of(x, factor, tile, numel, seed, C)
    code = tl.where(finite, code, 1 << (C.bits - 1))
    byte = tl.where(tl.max(magnitude_of(x), 1) == 0, 255, byte)

    block = tl.arange(0, 16)
    tl.store(wire + at + tile, exponent.to(tl.uint8))
    tl.store(wire + at + tiles + 16 * tile + block, byte.to(tl.uint8), mask=block < here)
    _pack(code, wire, at + tiles + blocks + tile.to(tl.int64) * (2 * C.bits * C.block), here * C.block, C)
    end = tiles + blocks + blocks.to(tl.int64) * C.block * C.bits // 8
    zero_bytes(wire, at + end, tl.where(tile == 0, (4 - end % 4) % 4, 0))
    return _values_of(exponent, byte, code, 1.0, C)


@triton.jit
def decode_tile(wire, at, tile, numel, alpha, C: tl.constexpr):
    """(16, block) values times alpha."""
    tiles, blocks = _sizes(numel, C)
    here, block = tl.minimum(blocks - 16 * tile, 16).to(tl.int32), tl.arange(0, 16)
    exponent = tl.load(wire + at + tile).to(tl.int32)
    byte = tl.load(wire + at + tiles + 16 * tile + block, mask=block < here, other=255).to(tl.int32)
    code = _unpack(wire, at + tiles + blocks + tile.to(tl.int64) * (2 * C.bits * C.block), here * C.block, C)
    return _values_of(exponent, byte, code, alpha, C)


@triton.jit
def _sizes(numel, C: tl.constexpr):
    """The number of tiles and blocks of a tensor."""
    unit: tl.constexpr = C.hadamard if C.hadamard > C.block else C.block
    blocks = tl.cdiv(numel, unit) * (unit // C.block)
    return tl.cdiv(blocks, 16), blocks


# -- scales and codes --------------------------------------------------------------------------------------------


@triton.jit
def _codes_of(x, factor, tile, numel, seed, C: tl.constexpr):
    """Scale bytes (16,) and codes (16, block)."""
    place = tile * (16 * C.block) + places(16, C.block)
    there = (place < numel) | (C.hadamard > 0)
    byte = _scale_byte(_wanted_scale(x, factor, there, C), C)
    inverse = tl.minimum(tl.div_rn(1.0, _scale_of(byte, C)) * factor, LAST)
    u = x * inverse[:, None]
    if C.widest > 0:
        u = tl.minimum(tl.maximum(u, -REACH), REACH)
    if C.stochastic:
        code = _stochastic(u, place, seed, C)
    else:
        code = (bits_of(_encoder(u, C) + (49152.0 + (1 << (C.bits - 1)))) >> 8) & ((1 << C.bits) - 1)
    if C.fit:
        level = tl.where(there, tl.abs(_level_of(code, C)), 0.0)
        product = tree_sum(tl.abs(x * factor) * level, 16, C.block)
        byte = _scale_byte(tl.div_rn(product, tree_sum(level * level, 16, C.block)), C)
    return byte, code


@triton.jit
def _wanted_scale(x, factor, there, C: tl.constexpr):
    if C.widest > 0:
        a = x * factor
        present = tl.maximum(tl.sum(there.to(tl.int32), 1), 1)
        share = tl.div_rn(1.0, present.to(tl.float32))
        return tl.sqrt_rn(tree_sum(a * a, 16, C.block) * share) * C.widest
    else:
        largest = float_of(tl.max(magnitude_of(x), 1)) * factor
        if C.stochastic:
            largest = largest * C.inverse_top
        return largest


@triton.jit
def _scale_byte(scale, C: tl.constexpr):
    rounding: tl.constexpr = (1 << 19) - 1 if C.stochastic else 1 << 18
    return tl.minimum(tl.maximum(C.base - ((bits_of(scale) + rounding) >> 19), 1), 254)


@triton.jit
def _scale_of(byte, C: tl.constexpr):
    return float_of((C.base - byte) << 19)


@triton.jit
def _encoder(x, C: tl.constexpr):
    z = x * x
    return (((z * C.e3 + C.e2) * z + C.e1) * z + C.e0) * x


@triton.jit
def _decoder(x, C: tl.constexpr):
    z = x * x
    return (((z * C.d3 + C.d2) * z + C.d1) * z + C.d0) * x


@triton.jit
def _level_of(code, C: tl.constexpr):
    return _decoder(code.to(tl.float32) - ((1 << (C.bits - 1)) - 0.5), C)


@triton.jit
def _stochastic(u, place, seed, C: tl.constexpr):
    """The level below or the one above, such that the expectation is `u`."""
    last: tl.constexpr = (1 << C.bits) - 2.0
    below = tl.minimum(tl.maximum(tl.floor(_encoder(u, C) + (last / 2 + 0.5)), 0.0), last)
    low, high = _level_of(below, C), _level_of(below + 1.0, C)
    below = below - (u < low).to(tl.float32) + (u > high).to(tl.float32)
    below = tl.minimum(tl.maximum(below, 0.0), last)
    low, high = _level_of(below, C), _level_of(below + 1.0, C)
    up = uniform(place, seed) < tl.div_rn(u - low, high - low)
    return below.to(tl.int32) + up.to(tl.int32)


@triton.jit
def _values_of(exponent, byte, code, alpha, C: tl.constexpr):
    """Multiply by the scale first: scale times binade may exceed the range of a float where the value does not."""
    last = tl.where(exponent == 255, float("nan"), float_of(exponent << 23)) * alpha
    s = tl.where(byte == 255, 0.0, _scale_of(byte, C))
    t = code.to(tl.float32) - ((1 << (C.bits - 1)) - 0.5)
    z = t * t
    if C.hadamard:
        c3, c2, c1, c0 = s * C.d3, s * C.d2, s * C.d1, s * C.d0
        y = (((z * c3[:, None] + c2[:, None]) * z + c1[:, None]) * z + c0[:, None]) * t
        return rotated_back(y, C) * last
    else:
        c3, c2, c1, c0 = s * C.d3 * last, s * C.d2 * last, s * C.d1 * last, s * C.d0 * last
        return (((z * c3[:, None] + c2[:, None]) * z + c1[:, None]) * z + c0[:, None]) * t


# -- bit planes --------------------------------------------------------------------------------------------------


@triton.jit
def _pack(code, wire, at, width, C: tl.constexpr):
    """Write the codes of the first `width` values: the plane of 4 or 2 bits, and that of the other bits."""
    wide: tl.constexpr = 4 if C.bits >= 4 else 2
    code = tl.reshape(code, [16 * C.block])
    _pack_plane(code, wire, at, width, wide, 16 * C.block)
    if C.bits > wide:
        _pack_plane(code >> wide, wire, at + width * wide // 8, width, C.bits - wide, 16 * C.block)


@triton.jit
def _pack_plane(code, wire, at, width, BITS: tl.constexpr, TILE: tl.constexpr):
    """Byte i of n is value i | value i + n << BITS | value i + 2n << 2 * BITS ..."""
    parts: tl.constexpr = 8 // BITS
    size, place = width // parts, tl.arange(0, TILE)
    moved = tl.gather(code & ((1 << BITS) - 1), place // parts + (place % parts) * size, 0)
    shifts = tl.arange(0, parts)[None, :] * BITS
    byte = tl.sum(tl.reshape(moved, [TILE // parts, parts]) << shifts, 1).to(tl.uint8)
    i = tl.arange(0, TILE // parts)
    if (width == TILE) & (at % 4 == 0):
        tl.store(wire + tl.multiple_of(at, 4) + i, byte)
    else:
        tl.store(wire + at + i, byte, mask=i < size)


@triton.jit
def _unpack(wire, at, width, C: tl.constexpr):
    """(16, block) codes, of which the first `width` are on the wire."""
    wide: tl.constexpr = 4 if C.bits >= 4 else 2
    code = _unpack_plane(wire, at, width, wide, 16 * C.block)
    if C.bits > wide:
        code |= _unpack_plane(wire, at + width * wide // 8, width, C.bits - wide, 16 * C.block) << wide
    return tl.reshape(code, [16, C.block])


@triton.jit
def _unpack_plane(wire, at, width, BITS: tl.constexpr, TILE: tl.constexpr):
    parts: tl.constexpr = 8 // BITS
    size, i = width // parts, tl.arange(0, TILE // parts)
    if (width == TILE) & (at % 4 == 0):
        byte = tl.load(wire + tl.multiple_of(at, 4) + i)
    else:
        byte = tl.load(wire + at + i, mask=i < size, other=0)
    place, part = tl.arange(0, TILE), tl.zeros([TILE], tl.int32)
    for k in tl.static_range(1, parts):
        part += (place >= k * size).to(tl.int32)  # place // size, without a division
    moved = tl.gather(byte.to(tl.int32), tl.minimum(place - part * size, TILE // parts - 1), 0)
    return (moved >> (part * BITS)) & ((1 << BITS) - 1)


# -- the rotation ------------------------------------------------------------------------------------------------


@triton.jit
def rotated(x, C: tl.constexpr):
    """`gradwire.kernels.torch.hadamard.hadamard` of each group."""
    n: tl.constexpr = 16 * C.block
    y = _squares(tl.reshape(x, [n]), n)
    return tl.reshape(_far(y, n, C.hadamard), [16, C.block]) * NORMS[C.hadamard // 128]


@triton.jit
def rotated_back(x, C: tl.constexpr):
    """The inverse of `rotated`."""
    n: tl.constexpr = 16 * C.block
    y = _squares(_far(tl.reshape(x, [n]), n, C.hadamard), n)
    return tl.reshape(y, [16, C.block]) * NORMS[C.hadamard // 128]


@triton.jit
def _squares(x, N: tl.constexpr):
    return _near(tl.reshape(tl.permute(tl.reshape(_near(x, N), [N // 64, 8, 8]), [0, 2, 1]), [N]), N)


@triton.jit
def _near(x, N: tl.constexpr):
    return _butterfly(_butterfly(_butterfly(x, N, 8), N, 16), N, 32)


@triton.jit
def _far(x, N: tl.constexpr, GROUP: tl.constexpr):
    if GROUP > 64:
        x = _butterfly(x, N, 64)
    if GROUP > 128:
        x = _butterfly(x, N, 128)
    return x


@triton.jit
def _butterfly(x, N: tl.constexpr, DISTANCE: tl.constexpr):
    """The sum and the difference of values `DISTANCE` apart."""
    low, high = tl.split(tl.permute(tl.reshape(x, [N // (2 * DISTANCE), 2, DISTANCE]), [0, 2, 1]))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), [N])
