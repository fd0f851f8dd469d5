"""The hot loops on flat tensors: Numba on the CPU, Triton on GPUs, torch everywhere else, with the same bits.

A family of kernels is a set of modules with the same functions, such as `half.py` in `kernels/torch`, `kernels/numba`
and `kernels/triton`; their contracts are written in the first. `pick` chooses by the tensor. Numba and Triton compile a
kernel at its first use and cache it on disk. `register` uses every kernel of a hook once, so that no step waits for
this.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, bfloat16, compiler, device, float16, float32, nn  # `import torch` would be this package's

from gradwire.kernels.batch import Batch
from gradwire.kernels.torch import fp8, half, int8, levels, low_rank, sign, topk, whiten

__all__ = ["in_use"]

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
    "whiten": whiten,
}


def pick(family: str, tensor: Tensor) -> Any:
    """The module of a family that works on `tensor`."""
    if _suits_numba(tensor):
        return getattr(_numba, family)
    return getattr(load_triton(), family, _TORCH[family]) if _suits_triton(tensor) else _TORCH[family]


def batched(family: str, tensor: Tensor, *how: Any) -> Batch | None:
    """Kernels of a family that work on many tensors of a message at once; None if those of `tensor` do not."""
    make = getattr(pick(family, tensor), "batch", None)
    return None if make is None else make(*how)


def in_use(where: device | str) -> str:
    """The name of the kernels that work on float32 tensors of a device.

    Args:
        where: The device, or its name.

    Returns:
        `numba`, `triton` or `torch`.

    Examples:
        >>> gradwire.kernels.in_use("cpu")
        'numba'
    """
    where = device(where)
    if where.type == "cpu" and _numba is not None:
        return "numba"
    return "triton" if where.type in TRITON_DEVICES and load_triton() is not None else "torch"


TRITON_DEVICES = {"cuda"}
"""The types of devices that Triton kernels are used on; torch calls AMD's GPUs `cuda` as well."""


def load_triton() -> ModuleType | None:
    """Load the Triton kernels. None if they cannot be used; the first call says why."""
    found = _import_triton()
    return None if found is None or found.failed else found


@functools.cache
def _import_triton() -> ModuleType | None:
    instead = "gradwire uses its torch kernels on the GPU, which give the same results but take several times as long"
    try:
        from gradwire.kernels import triton
    except ImportError as error:
        log.warning("triton cannot be imported (%s): %s; torch's GPU builds come with triton", error, instead)
        return None
    if triton.too_old():
        log.warning("triton %s is older than %s: %s", triton.version(), triton.OLDEST, instead)
        return None
    return triton


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
    return _numba is not None and _is_plain(tensor) and tensor.device.type == "cpu" and tensor.dtype == float32


def _suits_triton(tensor: Tensor) -> bool:
    return (
        tensor.device.type in TRITON_DEVICES
        and _is_plain(tensor)
        and tensor.dtype in (float32, bfloat16, float16)
        and load_triton() is not None
    )


def _is_plain(tensor: Tensor) -> bool:
    return not compiler.is_compiling() and type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous()
