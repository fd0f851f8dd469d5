"""Whitening on the CPU: one pass, and no memory for the divisors."""

from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.numba.bits import F32, U64
from gradwire.kernels.numba.llvm import jit


def divide_(values: Tensor, moment: Tensor, floor: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.whiten`."""
    _divide(values.numpy(), moment.numpy(), F32(float(floor)))
    return values


def multiply_(values: Tensor, moment: Tensor, floor: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.whiten`."""
    _multiply(values.numpy(), moment.numpy(), F32(float(floor)))
    return values


@jit
def _divide(values: Any, moment: Any, floor: Any) -> None:
    for i in range(values.size):
        values[U64(i)] /= np.sqrt(moment[U64(i)] + floor)


@jit
def _multiply(values: Any, moment: Any, floor: Any) -> None:
    for i in range(values.size):
        values[U64(i)] *= np.sqrt(moment[U64(i)] + floor)
