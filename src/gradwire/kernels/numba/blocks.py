"""int2 to int6 on the CPU, block by block: the scale, the codes, and the scale that fits the codes best."""

from typing import Any

import numpy as np

from gradwire.kernels.grid import REACH
from gradwire.kernels.numba.bits import F32, U8, U32, U64, tree_sum, uniform
from gradwire.kernels.numba.llvm import bits_of, float_of, inline

NEAREST, UP = U32(1 << 18), U32((1 << 19) - 1)
"""What is added before a scale's last bits are cut off."""
_REACH = F32(REACH)


@inline
def present_in(there: int, j: int, block: int, group: int) -> Any:
    """How many values of block `j` are not padding. A rotation spreads the values over all of it."""
    return block if group else min(max(there - j * block, 1), block)


@inline
def rms(v: Any, at: Any, count: int, present: int, factor: Any, work: Any) -> Any:
    """Root of the mean square of the values that are present, times `factor`."""
    for i in range(count):
        a = v[at + U64(i)] * factor
        work[U64(i)] = a * a
    return np.sqrt(tree_sum(work, count) * F32(1.0 / present))


@inline
def scale_byte(scale, base, rounding):
    """A scale as it travels: a logarithm, backwards, so that 255 is left for zero."""
    return min(max(base - np.int64(U32(bits_of(scale) + rounding) >> U32(19)), 1), 254)


@inline
def scale_of(byte: int, base: int) -> Any:
    """The scale of a byte."""
    return float_of(U32(U32(base - byte) << U32(19)))


@inline
def polynomial(x: Any, c: Any) -> Any:
    """Odd, of degree seven: a codebook, or its inverse."""
    z = x * x
    return (((z * c[3] + c[2]) * z + c[1]) * z + c[0]) * x


@inline
def nearest(q, to, v, at, count, inverse, bits, encoder, clamped):
    """The nearest codes."""
    magic, mask = F32(49152 + (1 << (bits - 1))), U32((1 << bits) - 1)
    for i in range(count):
        u = v[at + U64(i)] * inverse
        if clamped:
            u = _REACH if u > _REACH else u
            u = -_REACH if u < -_REACH else u
        fine = bits_of(polynomial(u, encoder) + magic)
        q[to + U64(i)] = U8(U32(U32(fine >> U32(8)) & mask))


@inline
def dithered(q, to, v, at, count, inverse, bits, encoder, decoder, seed, position):
    """Stochastic rounding: one of the two codes around each value, such that the expectation is the value."""
    last, middle = F32((1 << bits) - 2), F32((1 << (bits - 1)) - 0.5)
    for i in range(count):
        u = v[at + U64(i)] * inverse
        below = _clamped(np.floor(polynomial(u, encoder) + middle), last)
        low, high = polynomial(below - middle, decoder), polynomial(below + F32(1.0) - middle, decoder)
        below = below - (F32(1.0) if u < low else F32(0.0)) + (F32(1.0) if u > high else F32(0.0))
        below = _clamped(below, last)
        low, high = polynomial(below - middle, decoder), polynomial(below + F32(1.0) - middle, decoder)
        up = uniform(position + i, seed) < (u - low) / (high - low)
        q[to + U64(i)] = U8(np.int32(below) + np.int32(up))


@inline
def _clamped(code: Any, last: Any) -> Any:
    code = code if code > F32(0.0) else F32(0.0)
    return code if code < last else last


@inline
def fitted_scale(q, to, v, at, count, present, factor, work, bits, decoder):
    """The scale that leaves the least error for these codes."""
    middle = F32((1 << (bits - 1)) - 0.5)
    for i in range(count):
        level = polynomial(F32(np.int32(q[to + U64(i)])) - middle, decoder)
        work[U64(i)] = abs(v[at + U64(i)] * factor) * abs(level)
    product = tree_sum(work, count)
    for i in range(count):
        level = polynomial(F32(np.int32(q[to + U64(i)])) - middle, decoder)
        work[U64(i)] = level * level if i < present else F32(0.0)
    return product / tree_sum(work, count)
