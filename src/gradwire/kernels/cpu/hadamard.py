"""The Hadamard rotation on the CPU, in the first-level cache: eight rows at a time, in registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.llvm import inline


@inline
def rotate(values: Any, work: Any, width: int, group: int, back: bool) -> None:
    """Rotate every `group` of the first `width` values, or rotate it back. Overwrites `work`, which is as long."""
    v, w = values[:width].reshape(width // 64, 64), work[:width].reshape(width // 64, 64)
    norm = np.float32(1.0 / np.sqrt(group))
    if back:
        _rows(w, v)
        _transpose(v, w)
        _rows(v, v)
        _far(values[:width], group)
        for i in range(width):
            values[i] *= norm
    else:
        _rows(v, v)
        _far(values[:width], group)
        _columns(w, v)
        for i in range(width):
            values[i] = work[i] * norm


@inline
def _eight(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """Butterflies at distances 1, 2 and 4."""
    a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
    a, c, b, d, e, g, f, h = a + c, a - c, b + d, b - d, e + g, e - g, f + h, f - h
    return a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h


@inline
def _rows(out: Any, v: Any) -> None:
    """Over the rows of every 8 x 8."""
    for s in range(v.shape[0]):
        for i in range(8):
            a, b, c, d, e, f, g, h = _eight(
                v[s, i], v[s, 8 + i], v[s, 16 + i], v[s, 24 + i], v[s, 32 + i], v[s, 40 + i], v[s, 48 + i], v[s, 56 + i]
            )
            out[s, i], out[s, 8 + i], out[s, 16 + i], out[s, 24 + i] = a, b, c, d
            out[s, 32 + i], out[s, 40 + i], out[s, 48 + i], out[s, 56 + i] = e, f, g, h


@inline
def _columns(out: Any, v: Any) -> None:
    """Over the columns of every 8 x 8, which is transposed on the way."""
    for s in range(v.shape[0]):
        for i in range(8):
            k = 8 * i
            a, b, c, d, e, f, g, h = _eight(
                v[s, k], v[s, k + 1], v[s, k + 2], v[s, k + 3], v[s, k + 4], v[s, k + 5], v[s, k + 6], v[s, k + 7]
            )
            out[s, i], out[s, 8 + i], out[s, 16 + i], out[s, 24 + i] = a, b, c, d
            out[s, 32 + i], out[s, 40 + i], out[s, 48 + i], out[s, 56 + i] = e, f, g, h


@inline
def _transpose(out: Any, v: Any) -> None:
    for s in range(v.shape[0]):
        for i in range(8):
            k = 8 * i
            out[s, i], out[s, 8 + i], out[s, 16 + i], out[s, 24 + i] = v[s, k], v[s, k + 1], v[s, k + 2], v[s, k + 3]
            out[s, 32 + i], out[s, 40 + i] = v[s, k + 4], v[s, k + 5]
            out[s, 48 + i], out[s, 56 + i] = v[s, k + 6], v[s, k + 7]


@inline
def _far(values: Any, group: int) -> None:
    """Between the 8 x 8 of a group."""
    if group == 128:
        v = values.reshape(values.size // 128, 128)
        for s in range(v.shape[0]):
            for i in range(64):
                a, b = v[s, i], v[s, 64 + i]
                v[s, i], v[s, 64 + i] = a + b, a - b
    if group == 256:
        v = values.reshape(values.size // 256, 256)
        for s in range(v.shape[0]):
            for i in range(64):
                a, b, c, d = v[s, i], v[s, 64 + i], v[s, 128 + i], v[s, 192 + i]
                a, b, c, d = a + b, a - b, c + d, c - d
                v[s, i], v[s, 64 + i], v[s, 128 + i], v[s, 192 + i] = a + c, b + d, a - c, b - d
