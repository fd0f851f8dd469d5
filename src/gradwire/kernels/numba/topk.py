"""The largest values of each block on the CPU: a bisection for the threshold, in the first-level cache."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.numba.bits import F32, U32, U64, largest
from gradwire.kernels.numba.llvm import bits_of, float_of, inline, jit
from gradwire.kernels.torch.topk import parts_of


def encode_(wire: Tensor, values: Tensor, block: int, kept: int) -> Tensor:
    """See `gradwire.kernels.torch.topk`."""
    _kernels(block, kept)[0](*_parts(wire, values.numel(), block, kept), values.numpy())
    return wire


def decode_(out: Tensor, wire: Tensor, block: int, kept: int, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.topk`."""
    if not add:
        out.zero_()
    _kernels(block, kept)[1](out.numpy(), *_parts(wire, out.numel(), block, kept), F32(alpha))
    return out


def _parts(wire: Tensor, numel: int, block: int, kept: int) -> tuple[Any, Any]:
    places, bits = parts_of(wire, -(-numel // block), kept)
    return places.numpy(), bits.view(torch.int16).numpy().view(np.uint16)


@functools.cache
def _kernels(block: int, kept: int) -> tuple[Any, Any]:
    @jit
    def encode(places, patterns, values):
        tail = np.zeros(block, np.float32)
        for b in range(places.size // kept):
            at = U64(b * block)
            if b * block + block <= values.size:
                _encode_block(places, patterns, U64(b * kept), values, at, block, kept)
            else:
                for i in range(values.size - b * block):
                    tail[U64(i)] = values[at + U64(i)]
                _encode_block(places, patterns, U64(b * kept), tail, U64(0), block, kept)

    @jit
    def decode(out, places, patterns, alpha):
        for n in range(places.size):
            at = U64((n // kept) * block) + (U64(places[n]) & U64(block - 1))
            if at < U64(out.size):
                out[at] += float_of(U32(U32(patterns[n]) << U32(16))) * alpha

    return encode, decode


@inline
def _encode_block(places, patterns, to, v, at, block, kept):
    threshold, above = _threshold(v, at, block, kept)
    equals = kept - above
    for i in range(block):
        bits = bits_of(v[at + U64(i)])
        magnitude = U32(bits & U32(0x7FFF_FFFF))
        if magnitude > threshold or (magnitude == threshold and equals > 0):
            equals -= 1 if magnitude == threshold else 0
            places[to] = i
            patterns[to] = _half(bits)
            to += U64(1)


@inline
def _threshold(v, at, block, kept):
    """A bit pattern that at most `kept` magnitudes exceed, with enough equal to it to make up for the rest."""
    low, high, above = np.int64(-1), np.int64(largest(v, at, block)), np.int64(0)
    while high - low > 1:
        middle = (low + high) // 2
        count = _count(v, at, block, U32(middle))
        if count > kept:
            low = middle
            continue
        high, above = middle, count
        if count == kept:
            break
    return U32(high), above


@inline
def _count(v, at, block, threshold):
    above = U32(0)
    for i in range(block):
        above += U32(1) if U32(bits_of(v[at + U64(i)]) & U32(0x7FFF_FFFF)) > threshold else U32(0)
    return np.int64(above)


@inline
def _half(bits: Any) -> Any:
    """The bfloat16 of a float's bit pattern, rounded to nearest."""
    odd = U32(U32(bits >> U32(16)) & U32(1))
    nan = U32(bits & U32(0x7FFF_FFFF)) > U32(0x7F80_0000)
    return np.uint16(0x7FC0) if nan else np.uint16(U32(U32(bits + U32(0x7FFF)) + odd) >> U32(16))
