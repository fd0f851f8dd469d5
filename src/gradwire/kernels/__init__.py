"""The hot loops on flat tensors: Numba on the CPU if it is installed, torch everywhere else, with the same bits.

A family of kernels is a pair of modules with the same functions, such as `kernels/torch/half.py` and
`kernels/numba/half.py`; their contracts are written in the first. `pick` chooses by the tensor. Numba compiles a kernel
at its first use and caches it on disk. `register` uses every kernel of a hook once, so that no step waits for this.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, compiler, device, float32, nn  # not `import torch`: that is a name of this package

from gradwire.kernels.torch import fp8, half, int8, levels, low_rank, sign, topk

log = logging.getLogger("gradwire")


@functools.cache
def load() -> ModuleType | None:
    """Load the Numba kernels. Warns once if Numba cannot be used; everything works without it, but slower."""
    global _numba
    try:
        from numba import config

        if config.DISABLE_JIT:  # type: ignore[attr-defined]
            log.warning("NUMBA_DISABLE_JIT is set: encoding on the CPU takes several times as long; unset it")
            return None
        from gradwire.kernels import numba
    except ImportError:
        log.warning("numba is not installed: encoding on the CPU takes several times as long; pip install numba")
        return None
    _numba = numba
    return numba


_numba: ModuleType | None = None
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
    """The module of a family that works on `tensor`."""
    return getattr(_numba, family) if _suits_numba(tensor) else _TORCH[family]


def in_use(where: device) -> str:
    """The name of the kernels that work on float32 tensors of a device: `numba` or `torch`."""
    return "numba" if _numba is not None and where.type == "cpu" else "torch"


@contextmanager
def reference() -> Iterator[None]:
    """Within, CPU tensors use the torch kernels, whose bits all others must have. No engine may be at work."""
    global _numba
    kept, _numba = _numba, None
    try:
        yield
    finally:
        _numba = kept


def _suits_numba(tensor: Tensor) -> bool:
    return (
        _numba is not None
        and not compiler.is_compiling()
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype == float32
        and tensor.is_contiguous()
    )
