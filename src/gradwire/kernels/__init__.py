"""Step 2: the hot loops on flat tensors. Numba on the CPU where it is installed, torch everywhere else; the same bits.

A family of kernels is a pair of modules with the same functions, `kernels/torch/half.py` and `kernels/cpu/half.py`; the
contracts are written in the first. `pick` chooses by the tensor. Numba compiles a kernel when it is first used and
keeps it on disk; hooks use theirs once when they are registered, so that no step ever waits for a compiler.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from torch import Tensor, compiler, float32, nn  # not `import torch`: that is a name of this package

from gradwire.kernels.torch import fp8, half, int8, levels, low_rank, sign, topk

log = logging.getLogger("gradwire")


@functools.cache
def load() -> ModuleType | None:
    """Get the CPU kernels ready. Says once if Numba is missing; everything works without it, slower."""
    global _cpu
    try:
        from gradwire.kernels import cpu
    except ImportError:
        log.warning("numba is not installed: encoding on the CPU takes several times as long; pip install numba")
        return None
    _cpu = cpu
    return cpu


_cpu: ModuleType | None = None
_TORCH = {
    "fp8": fp8,
    "half": half,
    "int8": int8,
    "levels": levels,
    "low_rank": low_rank,
    "sign": sign,
    "topk": topk,
}


def pick(family: str, tensor: Tensor) -> Any:
    """The module of a family that can work on `tensor`."""
    return getattr(_cpu, family) if _fast(tensor) else _TORCH[family]


def _fast(tensor: Tensor) -> bool:
    return (
        _cpu is not None
        and not compiler.is_compiling()
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype == float32
        and tensor.is_contiguous()
    )
