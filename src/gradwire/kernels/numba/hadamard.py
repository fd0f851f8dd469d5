"""The Hadamard rotation on the CPU: 64 values at a time in eight vector registers, written in LLVM's own terms.

The compiler does not find a way to transpose 8 x 8 values in registers by itself; told how, it is ten times as fast.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.numba.bits import U64
from gradwire.kernels.numba.llvm import inline

_ROW, _INDEX = ir.VectorType(ir.FloatType(), 8), ir.IntType(64)


@inline
def rotate(values, width, group, back):
    """Rotate every `group` of the first `width` values, or rotate it back."""
    norm = np.float32(1.0 / np.sqrt(group))
    if back:
        _far(values, width, group)
    for at in range(0, width, 64):
        _square(values, U64(at))
    if not back:
        _far(values, width, group)
    for i in range(width):
        values[U64(i)] *= norm


@intrinsic
def _square(typing_context: Any, values: Any, at: Any) -> Any:
    """64 values as 8 x 8, in place: butterflies over the rows, transpose, butterflies over the rows."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        first = builder.bitcast(builder.gep(array.data, [args[1]]), _ROW.as_pointer())
        places = [builder.gep(first, [ir.Constant(_INDEX, k)]) for k in range(8)]
        rows = [builder.load(place, align=4) for place in places]
        rows = _butterflies(builder, _transposed(builder, _butterflies(builder, rows)))
        for place, row in zip(places, rows, strict=True):
            builder.store(row, place, align=4)
        return context.get_dummy_value()

    return types.void(values, at), emit


def _butterflies(builder: Any, rows: list[Any]) -> list[Any]:
    """At distances 1, 2 and 4."""
    for distance in (1, 2, 4):
        done = list(rows)
        for k in range(8):
            low, high = rows[k & ~distance], rows[k | distance]
            done[k] = builder.fsub(low, high) if k & distance else builder.fadd(low, high)
        rows = done
    return rows


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Exchange halves at distances 4, 2 and 1."""
    for distance in (4, 2, 1):
        done = list(rows)
        for k in range(8):
            if not k & distance:
                low, high = rows[k], rows[k | distance]
                done[k] = _picked(builder, low, high, [i & ~distance | (8 if i & distance else 0) for i in range(8)])
                done[k | distance] = _picked(
                    builder, low, high, [(i | distance) if not i & distance else i + 8 for i in range(8)]
                )
        rows = done
    return rows


def _picked(builder: Any, low: Any, high: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), 8), lanes))


@inline
def _far(values: Any, width: int, group: int) -> None:
    """Between the squares of a group."""
    for distance in (64, 128):
        if distance < group:
            for at in range(0, width, 2 * distance):
                for i in range(distance):
                    a, b = values[U64(at + i)], values[U64(at + distance + i)]
                    values[U64(at + i)] = a + b
                    values[U64(at + distance + i)] = a - b
