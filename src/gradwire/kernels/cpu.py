"""The kernels in Numba, for float32 on the CPU: one pass each, GIL released, compiled on import and cached on disk.

Numba has no 16-bit floats on the CPU, but LLVM does: four one-line intrinsics let loops over bit patterns convert with
the processor's own instructions. Maxima are taken on integers, because a float maximum does not vectorise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

_jit = numba.njit(nogil=True, cache=True, error_model="numpy")


def half_scale(values: Tensor) -> Tensor:
    """See `gradwire.kernels`."""
    return torch.tensor(_half_scale(values.numpy()), dtype=torch.float32)


def to_fp16_(out: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """See `gradwire.kernels`."""
    _to_fp16(_patterns(out), values.numpy(), np.float32(factor.item()))
    return out


def from_fp16_(out: Tensor, halves: Tensor, factor: Tensor, add: bool) -> Tensor:
    """See `gradwire.kernels`."""
    (_add_fp16 if add else _from_fp16)(out.numpy(), _patterns(halves), np.float32(factor.item()))
    return out


def to_bf16_(out: Tensor, values: Tensor) -> Tensor:
    """See `gradwire.kernels`."""
    _to_bf16(_patterns(out), values.numpy())
    return out


def from_bf16_(out: Tensor, values: Tensor, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels`."""
    (_add_bf16 if add else _from_bf16)(out.numpy(), _patterns(values), np.float32(alpha))
    return out


def _patterns(halves: Tensor) -> Any:
    return halves.view(torch.int16).numpy().view(np.uint16)


def _llvm(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic that is one or two LLVM instructions on one value."""

    @intrinsic
    def instruction(typing_context: Any, value: Any) -> Any:
        return result(argument), lambda context, builder, signature, args: emit(builder, args[0])

    return instruction


_BITS, _FLOAT, _HALF = ir.IntType(32), ir.FloatType(), ir.HalfType()
bits_of = _llvm(types.uint32, types.float32, lambda b, x: b.bitcast(x, _BITS))
float_of = _llvm(types.float32, types.uint32, lambda b, x: b.bitcast(x, _FLOAT))
half_to_float = _llvm(types.float32, types.uint16, lambda b, x: b.fpext(b.bitcast(x, _HALF), _FLOAT))
float_to_half = _llvm(types.uint16, types.float32, lambda b, x: b.bitcast(b.fptrunc(x, _HALF), ir.IntType(16)))


@_jit
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


@_jit
def _to_fp16(out: Any, values: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] = float_to_half(values[i] * factor)


@_jit
def _from_fp16(out: Any, patterns: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] = half_to_float(patterns[i]) * factor


@_jit
def _add_fp16(out: Any, patterns: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] += half_to_float(patterns[i]) * factor


@_jit
def _to_bf16(out: Any, values: Any) -> None:
    for i in range(out.size):
        bits = bits_of(values[i])
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        nan = np.uint32(bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
        out[i] = np.uint16(0x7FC0) if nan else np.uint16(rounded)


@_jit
def _from_bf16(out: Any, patterns: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] = float_of(np.uint32(np.uint32(patterns[i]) << np.uint32(16))) * factor


@_jit
def _add_bf16(out: Any, patterns: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] += float_of(np.uint32(np.uint32(patterns[i]) << np.uint32(16))) * factor


def _compile() -> None:
    """Run every kernel once, so that the compiler never runs in a training step."""
    values, halves = torch.ones(3), torch.empty(3, dtype=torch.float16)
    factor = half_scale(values)
    for add in (False, True):
        from_fp16_(values, to_fp16_(halves, values, factor), factor, add)
        from_bf16_(values, to_bf16_(halves.view(torch.bfloat16), values), 1.0, add)


_compile()
