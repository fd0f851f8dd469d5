"""What Numba lacks: bit patterns of floats, and 16-bit floats, as single LLVM instructions.

Loops over bit patterns convert with the processor's own instructions, and take maxima on integers, because a float
maximum does not vectorise.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def jit(function: Callable[..., Any]) -> Any:
    """Compile at first use. Cached on disk, unless there is no folder that can be written to."""
    return _compiled(function)


def inline(function: Callable[..., Any]) -> Any:
    """Like `jit`, for a part of another kernel: it sees the caller's constants, which is what makes loops fast."""
    return _compiled(function, forceinline=True)


def loose(function: Callable[..., Any]) -> Any:
    """Like `inline`, for sums whose order the compiler may choose: not for what must be the same bits on all ranks."""
    return _compiled(function, forceinline=True, fastmath={"reassoc", "contract", "nsz"})


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    make: Any = numba.njit
    try:
        return make(nogil=True, cache=True, error_model="numpy", **options)(function)
    except RuntimeError:
        return make(nogil=True, error_model="numpy", **options)(function)


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
