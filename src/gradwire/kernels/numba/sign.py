"""One bit per value on the CPU, in one pass."""

import functools
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.numba.bits import F32, U8, U32, U64, tree_sum
from gradwire.kernels.numba.llvm import bits_of, float_of, inline, jit
from gradwire.kernels.torch.sign import parts_of


def encode_(wire: Tensor, values: Tensor, block: int) -> Tensor:
    """See `gradwire.kernels.torch.sign`."""
    signs, scales = parts_of(wire, -(-values.numel() // block), block)
    _kernels(block)[0](signs.numpy(), scales.numpy(), values.numpy())
    return wire


def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.sign`."""
    signs, scales = parts_of(wire, -(-out.numel() // block), block)
    _kernels(block)[1](out.numpy(), signs.numpy(), scales.numpy(), F32(alpha), add)
    return out


@functools.cache
def _kernels(block: int) -> tuple[Any, Any]:
    eighth = block // 8

    @jit
    def encode(signs, scales, values):
        work, tail = np.empty(block, np.float32), np.zeros(block, np.float32)
        for b in range(scales.size):
            at = U64(b * block)
            if b * block + block <= values.size:
                scales[b] = _encode_block(signs, U64(b * eighth), values, at, block, block, work)
            else:
                for i in range(values.size - b * block):
                    tail[U64(i)] = values[at + U64(i)]
                present = values.size - b * block
                scales[b] = _encode_block(signs, U64(b * eighth), tail, U64(0), block, present, work)

    @jit
    def decode(out, signs, scales, alpha, add):
        tail = np.zeros(block, np.float32)
        for b in range(scales.size):
            at, scale, there = U64(b * block), bits_of(scales[b] * alpha), min(block, out.size - b * block)
            if there == block and add:
                _decode_block(out, at, signs, U64(b * eighth), block, scale, True)
            elif there == block:
                _decode_block(out, at, signs, U64(b * eighth), block, scale, False)
            else:
                _decode_block(tail, U64(0), signs, U64(b * eighth), block, scale, False)
                for i in range(there):
                    out[at + U64(i)] = tail[U64(i)] + (out[at + U64(i)] if add else F32(-0.0))

    return encode, decode


@inline
def _encode_block(signs, to, v, at, block, present, work):
    eighth, share = block // 8, F32(1.0 / present)
    for i in range(block // 2):  # the first step of the tree
        work[U64(i)] = abs(v[at + U64(i)]) * share + abs(v[at + U64(block // 2 + i)]) * share
    for i in range(eighth):
        byte = U32(0)
        for k in range(8):
            byte |= U32(U32(bits_of(v[at + U64(k * eighth + i)]) >> U32(31)) << U32(k))
        signs[to + U64(i)] = U8(byte)
    return tree_sum(work, U64(0), block // 2)


@inline
def _decode_block(out, at, signs, begin, block, scale, add):
    """Eight calls instead of a loop, in which LLVM vectorises badly: it takes six times as long."""
    n = block // 8
    _decode_part(out, at, signs, begin, n, scale, 0, add)
    _decode_part(out, at, signs, begin, n, scale, 1, add)
    _decode_part(out, at, signs, begin, n, scale, 2, add)
    _decode_part(out, at, signs, begin, n, scale, 3, add)
    _decode_part(out, at, signs, begin, n, scale, 4, add)
    _decode_part(out, at, signs, begin, n, scale, 5, add)
    _decode_part(out, at, signs, begin, n, scale, 6, add)
    _decode_part(out, at, signs, begin, n, scale, 7, add)


@inline
def _decode_part(out, at, signs, begin, n, scale, part, add):
    to = at + U64(part * n)
    for i in range(n):
        sign = U32(U32(U32(signs[begin + U64(i)]) << U32(31 - part)) & U32(0x8000_0000))
        value = float_of(U32(scale ^ sign))
        out[to + U64(i)] = out[to + U64(i)] + value if add else value
