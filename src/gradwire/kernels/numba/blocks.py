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
def mean_squares(means, v, at, width, there, block, group, factor, work):
    """For each block, the mean square of the values that are present, times `factor`."""
    half, blocks = block // 2, width // block
    for j in range(blocks):
        low, to = at + U64(j * block), U64(j * half)
        high = low + U64(half)
        for i in range(half):  # with the first step of the sum
            a, b = v[low + U64(i)] * factor, v[high + U64(i)] * factor
            work[to + U64(i)] = a * a + b * b
    for j in range(blocks):  # apart from the loop before, so that the processor can work on several at once
        means[U64(j)] = tree_sum(work, U64(j * half), half) * F32(1.0 / present_in(there, j, block, group))


@inline
def scale_byte(scale, base, rounding):
    """A scale as it travels: a logarithm, backwards, so that 255 is left for zero."""
    return min(max(base - np.int64(U32(bits_of(scale) + rounding) >> U32(19)), 1), 254)


@inline
def scale_of(byte: int, base: int) -> Any:
    """The scale of a byte."""
    return float_of(U32(U32(base - byte) << U32(19)))


@inline
def polynomial(x: Any, c: Any, terms: int) -> Any:
    """Odd, of degree seven: a codebook, or its inverse. From `terms` on the coefficients are 0."""
    z = x * x
    if terms == 1:
        return c[0] * x
    if terms == 2:
        return (z * c[1] + c[0]) * x
    if terms == 3:
        return ((z * c[2] + c[1]) * z + c[0]) * x
    return (((z * c[3] + c[2]) * z + c[1]) * z + c[0]) * x


@inline
def terms_of(c: Any) -> int:
    """The number of coefficients before the zeros at the end; a constant, if they are."""
    if c[3] != F32(0.0):
        return 4
    if c[2] != F32(0.0):
        return 3
    return 2 if c[1] != F32(0.0) else 1


@inline
def nearest(q, to, v, at, count, inverse, bits, encoder, clamped):
    """The nearest codes."""
    magic, mask = F32(49152 + (1 << (bits - 1))), U32((1 << bits) - 1)
    for i in range(count):
        u = v[at + U64(i)] * inverse
        if clamped:
            u = _REACH if u > _REACH else u
            u = -_REACH if u < -_REACH else u
        fine = bits_of(polynomial(u, encoder, terms_of(encoder)) + magic)
        q[to + U64(i)] = U8(U32(U32(fine >> U32(8)) & mask))


@inline
def dithered(q, to, v, at, count, inverse, bits, encoder, decoder, seed, position):
    """Stochastic rounding: one of the two codes around each value, such that the expectation is the value."""
    last, middle = F32((1 << bits) - 2), F32((1 << (bits - 1)) - 0.5)
    for i in range(count):
        u = v[at + U64(i)] * inverse
        below = _clamped(np.floor(polynomial(u, encoder, terms_of(encoder)) + middle), last)
        low, high = _level(below - middle, decoder), _level(below + F32(1.0) - middle, decoder)
        below = below - (F32(1.0) if u < low else F32(0.0)) + (F32(1.0) if u > high else F32(0.0))
        below = _clamped(below, last)
        low, high = _level(below - middle, decoder), _level(below + F32(1.0) - middle, decoder)
        up = uniform(position + i, seed) < (u - low) / (high - low)
        q[to + U64(i)] = U8(np.int32(below) + np.int32(up))


@inline
def _clamped(code: Any, last: Any) -> Any:
    code = code if code > F32(0.0) else F32(0.0)
    return code if code < last else last


@inline
def fitted_scales(scales, q, v, at, width, there, block, group, factor, work, bits, decoder):
    """For each block, the scale that leaves the least error for its codes."""
    half, blocks, middle = block // 2, width // block, F32((1 << (bits - 1)) - 0.5)
    for j in range(blocks):
        low, codes, to = at + U64(j * block), U64(j * block), U64(j * half)
        high, more, squares = low + U64(half), codes + U64(half), to + U64(blocks * half)
        present = present_in(there, j, block, group)
        for i in range(half):
            a = abs(_level(F32(np.int32(q[codes + U64(i)])) - middle, decoder))
            b = abs(_level(F32(np.int32(q[more + U64(i)])) - middle, decoder))
            work[to + U64(i)] = abs(v[low + U64(i)] * factor) * a + abs(v[high + U64(i)] * factor) * b
            a = a if i < present else F32(0.0)
            b = b if i + half < present else F32(0.0)
            work[squares + U64(i)] = a * a + b * b
    for j in range(blocks):
        to = U64(j * half)
        scales[U64(j)] = tree_sum(work, to, half) / tree_sum(work, to + U64(blocks * half), half)


@inline
def _level(t: Any, decoder: Any) -> Any:
    return polynomial(t, decoder, terms_of(decoder))
