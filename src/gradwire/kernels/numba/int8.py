"""8-bit integers on the CPU: a block is read from memory once."""

import functools
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.memory import rows_of
from gradwire.kernels.numba.bits import F32, U8, U32, U64, largest, uniform
from gradwire.kernels.numba.llvm import bits_of, float_of, inline, jit
from gradwire.kernels.torch.int8 import INVERSE_127, SMALLEST

_INVERSE_127, _SMALLEST, _MAGIC = F32(INVERSE_127), F32(SMALLEST), F32(12582912.0)


def encode_(wire: Tensor, values: Tensor, block: int, stochastic: bool = False, seed: int = 0) -> Tensor:
    """See `gradwire.kernels.torch.int8`."""
    return reduce_(wire, values, wire.view(1, -1), 0, block, 1.0, stochastic, seed)


def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.int8`."""
    return sum_(out, wire.view(1, -1), block, alpha, add)


def sum_(out: Tensor, wires: Tensor, block: int, alpha: float, add: bool = False) -> Tensor:
    """`out = alpha * values` of the first wire, `+= alpha * values` of every other, in one pass over `out`."""
    codes, stride, count = rows_of(wires)
    _kernels(block)[1](out.numpy(), codes.view(np.int8), codes.view(F32), stride, count, F32(alpha), add)
    return out


def reduce_(
    wire: Tensor, own: Tensor, wires: Tensor, skip: int, block: int, alpha: float, stochastic: bool, seed: int = 0
) -> Tensor:
    """Encode `alpha * own`, `+= alpha * values` of every wire but one: no pass over memory for the sum."""
    codes, stride, count = rows_of(wires)
    others, here = (codes.view(np.int8), codes.view(F32), stride, count), wire.numpy()
    how = F32(alpha), stochastic, U32(seed & 0xFFFF_FFFF)
    _kernels(block)[0](here, here.view(F32), own.numpy(), *others, skip, *how)
    return wire


@functools.cache
def _kernels(block: int) -> tuple[Any, Any]:
    @jit
    def reduce(wire, wire_scales, own, codes, scales, stride, count, skip, alpha, stochastic, seed):
        blocks = (own.size + block - 1) // block
        x = np.zeros(block, np.float32)
        for b in range(blocks):
            at, there = U64(b * block), min(block, own.size - b * block)
            scale_at = U64((blocks * block) // 4 + b)
            if count == 1 and there == block:
                wire_scales[scale_at] = _encode_block(wire, at, own, at, block, stochastic, seed)
                continue
            for i in range(there):
                x[U64(i)] = own[at + U64(i)] * alpha
            for r in range(count):
                if r != skip:
                    row = U64(r * stride)
                    _decode_block(x, U64(0), codes, row + at, scales[row // U64(4) + scale_at] * alpha, block, True)
            for i in range(there, block):
                x[U64(i)] = F32(0.0)
            wire_scales[scale_at] = _encode_block(wire, at, x, U64(0), block, stochastic, seed)

    @jit
    def total(out, codes, scales, stride, count, alpha, add):
        blocks = (out.size + block - 1) // block
        for b in range(blocks):
            at, there = U64(b * block), min(block, out.size - b * block)
            for r in range(count):
                row = U64(r * stride)
                scale = scales[row // U64(4) + U64((blocks * block) // 4 + b)] * alpha
                if there == block:
                    _decode_block(out, at, codes, row + at, scale, block, add or r > 0)
                else:
                    _decode_block(out, at, codes, row + at, scale, there, add or r > 0)

    return reduce, total


@inline
def _encode_block(wire, to, v, at, block, stochastic, seed):
    top = largest(v, at, block)
    if top >= U32(0x7F80_0000):
        for i in range(block):
            wire[to + U64(i)] = U8(0)
        return F32(np.nan)
    scale = max(float_of(top) * _INVERSE_127, _SMALLEST)
    inverse = F32(1.0) / scale
    if stochastic:
        for i in range(block):
            code = np.floor(v[at + U64(i)] * inverse + uniform(to + U64(i), seed))
            code = min(max(code, F32(-127.0)), F32(127.0))
            wire[to + U64(i)] = U8(bits_of(code + _MAGIC))
    else:
        for i in range(block):
            wire[to + U64(i)] = U8(bits_of(v[at + U64(i)] * inverse + _MAGIC))
    return scale


@inline
def _decode_block(out, at, codes, begin, scale, count, add):
    if add:
        for i in range(count):
            out[at + U64(i)] += F32(np.int32(codes[begin + U64(i)])) * scale
    else:
        for i in range(count):
            out[at + U64(i)] = F32(np.int32(codes[begin + U64(i)])) * scale
