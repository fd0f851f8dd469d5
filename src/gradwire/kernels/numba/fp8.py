"""8-bit floats on the CPU, by arithmetic on bit patterns."""

import functools
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.numba.bits import F32, U8, U32, U64, largest
from gradwire.kernels.numba.llvm import bits_of, float_of, inline, jit
from gradwire.kernels.torch.fp8 import INVERSE_LARGEST, LARGEST
from gradwire.kernels.torch.int8 import SMALLEST, parts_of

_INVERSE_LARGEST, _SMALLEST, _LARGEST = F32(INVERSE_LARGEST), F32(SMALLEST), F32(LARGEST)
_MAGIC, _NORMAL = F32(12582912.0), F32(2.0**-6)


def encode_(wire: Tensor, values: Tensor, block: int) -> Tensor:
    """See `gradwire.kernels.torch.fp8`."""
    codes, scales = parts_of(wire, -(-values.numel() // block), block)
    _kernels(block)[0](codes.numpy().view(np.uint8), scales.numpy(), values.numpy())
    return wire


def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.fp8`."""
    codes, scales = parts_of(wire, -(-out.numel() // block), block)
    _kernels(block)[1](out.numpy(), codes.numpy().view(np.uint8), scales.numpy(), F32(alpha), add)
    return out


@functools.cache
def _kernels(block: int) -> tuple[Any, Any]:
    @jit
    def encode(codes, scales, values):
        tail = np.zeros(block, np.float32)
        for b in range(scales.size):
            at = U64(b * block)
            if b * block + block <= values.size:
                scales[b] = _encode_block(codes, at, values, at, block)
            else:
                for i in range(values.size - b * block):
                    tail[U64(i)] = values[at + U64(i)]
                scales[b] = _encode_block(codes, at, tail, U64(0), block)

    @jit
    def decode(out, codes, scales, alpha, add):
        for b in range(scales.size):
            at, scale = U64(b * block), scales[b] * alpha
            if b * block + block <= out.size:
                _decode_block(out, codes, at, block, scale, add)
            else:
                _decode_block(out, codes, at, out.size - b * block, scale, add)

    return encode, decode


@inline
def _encode_block(codes, to, v, at, block):
    top = largest(v, at, block)
    if top >= U32(0x7F80_0000):
        for i in range(block):
            codes[to + U64(i)] = U8(0)
        return F32(np.nan)
    scale = max(float_of(top) * _INVERSE_LARGEST, _SMALLEST)
    inverse = F32(1.0) / scale
    for i in range(block):
        u = v[at + U64(i)] * inverse
        bits = bits_of(u)
        size = float_of(U32(bits & U32(0x7FFF_FFFF)))
        size = _LARGEST if size > _LARGEST else size
        pattern = bits_of(size)
        even = U32(U32(pattern >> U32(20)) & U32(1))
        normal = U32(U32(U32(pattern + U32(0x7_FFFF)) + even) >> U32(20)) - U32(120 << 3)
        small = U32(bits_of(size * F32(512.0) + _MAGIC) & U32(0xFF))
        code = small if size < _NORMAL else normal
        codes[to + U64(i)] = U8(U32(code | U32(U32(bits >> U32(31)) << U32(7))))
    return scale


@inline
def _decode_block(out, codes, at, count, scale, add):
    for i in range(count):
        code = U32(codes[at + U64(i)])
        low = U32(code & U32(0x7F))
        normal = float_of(U32(U32(low << U32(20)) + U32(120 << 23)))
        small = F32(np.int32(low)) * F32(2.0**-9)
        size = small if low < U32(8) else normal
        value = float_of(U32(bits_of(size) | U32(U32(code >> U32(7)) << U32(31)))) * scale
        out[at + U64(i)] = (out[at + U64(i)] if add else F32(-0.0)) + value
