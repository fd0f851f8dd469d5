"""fp16 and bf16 on the CPU: one pass each."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.memory import rows_of
from gradwire.kernels.numba.bits import U64
from gradwire.kernels.numba.llvm import bits_of, float_of, float_to_half, half_to_float, inline, jit


def half_scale(values: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    return torch.tensor(_half_scale(values.numpy()), dtype=torch.float32)


def to_fp16_(out: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    _to_fp16(_patterns(out), values.numpy(), np.float32(factor.item()))
    return out


def from_fp16_(out: Tensor, halves: Tensor, factor: Tensor, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    (_add_fp16 if add else _from_fp16)(out.numpy(), _patterns(halves), np.float32(factor.item()))
    return out


def to_bf16_(out: Tensor, values: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    _to_bf16(_patterns(out), values.numpy())
    return out


def from_bf16_(out: Tensor, values: Tensor, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    (_add_bf16 if add else _from_bf16)(out.numpy(), _patterns(values), np.float32(alpha))
    return out


def sum_bf16_(out: Tensor, wires: Tensor, alpha: float) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    patterns, stride, count = rows_of(wires.view(torch.int16))
    _sum_bf16(out.numpy(), patterns.view(np.uint16), stride, count, np.float32(alpha))
    return out


def sum_fp16_(out: Tensor, wires: Tensor, factors: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    patterns, stride, count = rows_of(wires.view(torch.int16))
    _sum_fp16(out.numpy(), patterns.view(np.uint16), stride, count, factors.contiguous().numpy())
    return out


def reduced_fp16_(out: Tensor, own: Tensor, wires: Tensor, skip: int, factors: Tensor, alpha: float) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    patterns, stride, count = rows_of(wires.view(torch.int16))
    others = patterns.view(np.uint16), stride, count, skip, factors.contiguous().numpy()
    _reduced_fp16(out.numpy(), own.numpy(), *others, np.float32(alpha))
    return out


def reduce_bf16_(wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    patterns, stride, count = rows_of(wires.view(torch.int16))
    _reduce_bf16(_patterns(wire), own.numpy(), patterns.view(np.uint16), stride, count, skip, np.float32(alpha))
    return wire


def _patterns(halves: Tensor) -> Any:
    return halves.view(torch.int16).numpy().view(np.uint16)


@jit
def _half_scale(values: Any) -> Any:
    largest = np.uint32(0)
    for i in range(values.size):
        magnitude = np.uint32(bits_of(values[i]) & np.uint32(0x7FFF_FFFF))
        largest = magnitude if magnitude > largest else largest
    if largest >= np.uint32(0x7F80_0000):
        return np.float32(1.0)
    if largest == np.uint32(0):
        return np.float32(2.0**-15)
    exponent = max(np.int32(largest >> np.uint32(23)) - np.int32(126), np.int32(-111))  # as frexp counts
    return float_of(np.uint32(exponent - np.int32(15) + np.int32(127)) << np.uint32(23))


@jit
def _to_fp16(out: Any, values: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] = float_to_half(values[i] * factor)


@jit
def _from_fp16(out: Any, patterns: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] = half_to_float(patterns[i]) * factor


@jit
def _add_fp16(out: Any, patterns: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] += half_to_float(patterns[i]) * factor


@jit
def _to_bf16(out: Any, values: Any) -> None:
    for i in range(out.size):
        out[i] = _bf16(values[i])


@inline
def _bf16(value: Any) -> Any:
    bits = bits_of(value)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    nan = np.uint32(bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.uint16(0x7FC0) if nan else np.uint16(rounded)


@jit
def _from_bf16(out: Any, patterns: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] = float_of(np.uint32(np.uint32(patterns[i]) << np.uint32(16))) * factor


@jit
def _add_bf16(out: Any, patterns: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] += float_of(np.uint32(np.uint32(patterns[i]) << np.uint32(16))) * factor


_TILE = 2048
"""Values that stay in the first-level cache while wire after wire is added to them."""


@jit
def _sum_bf16(out, patterns, stride, count, alpha):
    for at in range(0, out.size, _TILE):
        there = min(_TILE, out.size - at)
        for r in range(count):
            _add_row(out, U64(at), patterns, U64(r * stride + at), there, alpha, r > 0)


@jit
def _reduce_bf16(wire, own, patterns, stride, count, skip, alpha):
    x = np.empty(_TILE, np.float32)
    for at in range(0, own.size, _TILE):
        there = min(_TILE, own.size - at)
        for i in range(there):
            x[U64(i)] = own[U64(at + i)] * alpha
        for r in range(count):
            if r != skip:
                _add_row(x, U64(0), patterns, U64(r * stride + at), there, alpha, True)
        for i in range(there):
            wire[U64(at + i)] = _bf16(x[U64(i)])


@inline
def _add_row(out, to, patterns, begin, count, alpha, add):
    if add:
        for i in range(count):
            out[to + U64(i)] += float_of(np.uint32(np.uint32(patterns[begin + U64(i)]) << np.uint32(16))) * alpha
    else:
        for i in range(count):
            out[to + U64(i)] = float_of(np.uint32(np.uint32(patterns[begin + U64(i)]) << np.uint32(16))) * alpha


@jit
def _sum_fp16(out, patterns, stride, count, factors):
    for at in range(0, out.size, _TILE):
        there = min(_TILE, out.size - at)
        for i in range(there):
            out[U64(at + i)] = half_to_float(patterns[U64(at + i)]) * factors[0]
        for r in range(1, count):
            _add_halves(out, U64(at), patterns, U64(r * stride + at), there, factors[r])


@jit
def _reduced_fp16(out, own, patterns, stride, count, skip, factors, alpha):
    for at in range(0, out.size, _TILE):
        there = min(_TILE, out.size - at)
        for i in range(there):
            out[U64(at + i)] = own[U64(at + i)] * alpha
        for r in range(count):
            if r != skip:
                _add_halves(out, U64(at), patterns, U64(r * stride + at), there, factors[r])


@inline
def _add_halves(out, to, patterns, begin, count, factor):
    for i in range(count):
        out[to + U64(i)] += half_to_float(patterns[begin + U64(i)]) * factor
