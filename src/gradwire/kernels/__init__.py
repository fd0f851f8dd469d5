"""Step 2: the hot loops on flat tensors. Numba on the CPU where it is installed, torch everywhere else; the same bits.

Every function here picks the way by its first tensor. `load` compiles the CPU kernels (a second or two, once a machine:
they are cached on disk), so that no step ever waits for a compiler.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from torch import Tensor, compiler, float32, nn  # not `import torch`: that is a name of this package

from gradwire.kernels import torch as _torch

log = logging.getLogger("gradwire")


@functools.cache
def load() -> ModuleType | None:
    """Compile the CPU kernels. Says once if Numba is missing; everything works without it, slower."""
    global _cpu
    try:
        from gradwire.kernels import cpu
    except ImportError:
        log.warning(
            "numba is not installed: encoding on the CPU takes about twice as long; pip install 'gradwire[fast]'"
        )
        return None
    _cpu = cpu
    return cpu


_cpu: ModuleType | None = None


def half_scale(values: Tensor) -> Tensor:
    """The power of two that brings the largest magnitude into [2**14, 2**15); 1 where a value is inf or NaN.

    A 0-dim float32 tensor, at least 2**-126, so that it and its reciprocal are exact.
    """
    return _pick(values).half_scale(values)  # type: ignore[no-any-return]


def to_fp16_(out: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """`out = half(values * factor)`, rounded to nearest; `factor` is a 0-dim tensor."""
    return _pick(values).to_fp16_(out, values, factor)  # type: ignore[no-any-return]


def from_fp16_(out: Tensor, halves: Tensor, factor: Tensor, add: bool) -> Tensor:
    """`out = halves * factor`, or `out += halves * factor`."""
    return _pick(out).from_fp16_(out, halves, factor, add)  # type: ignore[no-any-return]


def to_bf16_(out: Tensor, values: Tensor) -> Tensor:
    """`out = bfloat16(values)`, rounded to nearest."""
    return _pick(values).to_bf16_(out, values)  # type: ignore[no-any-return]


def from_bf16_(out: Tensor, values: Tensor, alpha: float, add: bool) -> Tensor:
    """`out = values * alpha`, or `out += values * alpha`."""
    return _pick(out).from_bf16_(out, values, alpha, add)  # type: ignore[no-any-return]


def _pick(tensor: Tensor) -> Any:
    fast = (
        _cpu is not None
        and not compiler.is_compiling()
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype == float32
        and tensor.is_contiguous()
    )
    return _cpu if fast else _torch
