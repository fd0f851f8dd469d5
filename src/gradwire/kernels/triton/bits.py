"""Inside Triton kernels: bit patterns, sums in a fixed order, random numbers, and tiles of values in memory.

Every function gives the same bits as its counterpart in `gradwire.kernels.torch`, which rules out three habits: `/` and
`tl.sqrt` (approximations on NVIDIA; `tl.div_rn` and `tl.sqrt_rn` round correctly), `tl.sum` over floats (its order
depends on the layout), and contracted multiply-adds (switched off where kernels are launched).
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it rounds a float of up to 2**22 to a whole number, half to even, into the low bits."""
INFINITE = tl.constexpr(0x7F80_0000)


@triton.jit
def bits_of(x):
    """The bit pattern of a float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 with this bit pattern."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_of(x):
    """The bit pattern of `|x|`: it sorts like the magnitude, with inf and NaN on top."""
    return bits_of(x) & 0x7FFF_FFFF


@triton.jit
def tree_sum(x, R: tl.constexpr, K: tl.constexpr):
    """(R, K) -> (R,): halves on halves. K is a power of two up to 4096."""
    for step in tl.static_range(1, 13):
        if (K >> step) > 0:
            x = tl.sum(tl.reshape(x, [R, 2, K >> step]), 1)
    return tl.reshape(x, [R])


@triton.jit
def uniform(position, seed):
    """Numbers in [0, 1) that depend on nothing but the seed and the position."""
    h = position.to(tl.uint32) * 0x9E37_79B1 + seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EB_CA6B
    h = (h ^ (h >> 13)) * 0xC2B2_AE35
    h = h ^ (h >> 16)
    return (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def bf16_of(x):
    """The bit pattern of the nearest bfloat16, as uint16."""
    bits = bits_of(x)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFF_FFFF) > INFINITE, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def from_bf16(bits):
    """The float32 of a bfloat16's bit pattern."""
    return float_of(bits.to(tl.int32) << 16)


@triton.jit
def places(R: tl.constexpr, K: tl.constexpr):
    """The positions of a tile's values, (R, K)."""
    return tl.arange(0, R)[:, None] * K + tl.arange(0, K)[None, :]


@triton.jit
def load_tile(values, at, left, R: tl.constexpr, K: tl.constexpr):
    """(R, K) values from `at` on as float32, with zeros behind the first `left`.

    Only the last tile of a tensor has a mask: a mask of unknown length would make all loads scalar.
    """
    place = places(R, K)
    if left >= R * K:
        x = tl.load(values + at + place)
    else:
        x = tl.load(values + at + place, mask=place < left, other=0.0)
    if x.dtype == tl.bfloat16:
        return from_bf16(x.to(tl.uint16, bitcast=True))
    else:
        return x.to(tl.float32)


@triton.jit
def store_tile(values, at, left, x, R: tl.constexpr, K: tl.constexpr):
    """The inverse of `load_tile`: rounds to the type of `values` and leaves what is behind the first `left`."""
    place = places(R, K)
    if values.dtype.element_ty == tl.bfloat16:
        x = bf16_of(x).to(tl.bfloat16, bitcast=True)
    else:
        x = x.to(values.dtype.element_ty)
    if left >= R * K:
        tl.store(values + at + place, x)
    else:
        tl.store(values + at + place, x, mask=place < left)


@triton.jit
def typed(wire, at, KIND: tl.constexpr):
    """A pointer to numbers of another type, `at` bytes into a wire."""
    return (wire + at).to(tl.pointer_type(KIND))


@triton.jit
def zero_bytes(wire, at, count):
    """Up to 3 bytes of padding: what lay in memory must not travel."""
    place = tl.arange(0, 4)
    tl.store(wire + at + place, tl.zeros([4], tl.uint8), mask=place < count)
