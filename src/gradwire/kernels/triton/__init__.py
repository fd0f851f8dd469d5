"""The kernels in Triton, for GPUs: one pass over memory each, with the bits of `gradwire.kernels.torch`.

`coding` turns a codec into compile-time constants, `blocks` and `tiles` work inside a program, `passes` are the kernels,
`launch` starts them, and `calls` is what calls them. The other modules have the functions of `kernels/torch`.
"""

import triton

from gradwire.kernels.triton import fp8, half, int8, levels, sign, topk
from gradwire.kernels.triton.launch import LAUNCHERS, failed

OLDEST = (3, 3)
"""The first version with everything that the kernels use; torch 2.7 brings it."""

__all__ = ["LAUNCHERS", "failed", "fp8", "half", "int8", "levels", "sign", "topk", "version"]


def version() -> str:
    """The version of Triton."""
    return str(triton.__version__)
