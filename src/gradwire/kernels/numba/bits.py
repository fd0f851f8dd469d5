"""Loops that several kernels share: maxima on bit patterns, sums in a fixed order, random numbers without state.

Positions are unsigned: Numba guards a signed index against being negative, and LLVM does not vectorise the guard.
Blocks are positions in a larger array, because making a slice costs as much as encoding a block.
"""

from typing import Any

import numpy as np

from gradwire.kernels.numba.llvm import bits_of, inline

U8, U32, U64, F32 = np.uint8, np.uint32, np.uint64, np.float32


@inline
def largest(v: Any, at: Any, count: int) -> Any:
    """The largest bit pattern of a magnitude among `count` values from `at` on."""
    top = U32(0)
    for i in range(count):
        magnitude = U32(bits_of(v[at + U64(i)]) & U32(0x7FFF_FFFF))
        top = magnitude if magnitude > top else top
    return top


@inline
def tree_sum(v: Any, at: Any, count: int) -> Any:
    """The sum of `count` values (a power of two, at least 4) from `at` on, halves on halves. Overwrites them."""
    for step in range(1, 11):
        half = count >> step  # a constant, once the loop is unrolled: each addition is then a vector's
        if half >= 4:
            for i in range(half):
                v[at + U64(i)] += v[at + U64(i + half)]
    return (v[at] + v[at + U64(2)]) + (v[at + U64(1)] + v[at + U64(3)])


@inline
def uniform(position: Any, seed: Any) -> Any:
    """A number in [0, 1) that depends on nothing but the seed and the position."""
    h = U32(U32(position) * U32(0x9E37_79B1) + seed)
    h = U32(U32(h ^ U32(h >> U32(16))) * U32(0x85EB_CA6B))
    h = U32(U32(h ^ U32(h >> U32(13))) * U32(0xC2B2_AE35))
    h = U32(h ^ U32(h >> U32(16)))
    return F32(np.int32(h >> U32(8))) * F32(2.0**-24)
