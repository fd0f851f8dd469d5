"""The kernels in Triton, for GPUs: one pass over memory each, with the bits of `gradwire.kernels.torch`.

`coding` turns a codec into a compile-time constant, `blocks` and `tiles` work inside a program, `passes` are the
kernels, `launch` starts them, and `calls` is what calls them. The other modules have the functions of `kernels/torch`.
"""

import triton

from gradwire.kernels.triton import fp8, half, int8, levels, sign, topk
from gradwire.kernels.triton.launch import LAUNCHERS, failed

OLDEST = "3.3"
"""The first version with everything that the kernels use; torch 2.7 brings it."""

__all__ = ["LAUNCHERS", "OLDEST", "failed", "fp8", "half", "int8", "levels", "sign", "too_old", "topk", "version"]


def version() -> str:
    """The version of Triton."""
    return str(triton.__version__)


def too_old() -> bool:
    """Whether this version of Triton lacks what the kernels use."""
    return _numbers(version()) < _numbers(OLDEST)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
