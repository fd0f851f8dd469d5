"""Whitening: values are divided by the square root of a second moment, and multiplied by it again."""

import torch
from torch import Tensor


def divide_(values: Tensor, moment: Tensor, floor: Tensor) -> Tensor:
    """`values /= sqrt(moment + floor)`; `moment` is like `values`, `floor` a 0-dim tensor."""
    return values.div_(root(moment, floor))


def multiply_(values: Tensor, moment: Tensor, floor: Tensor) -> Tensor:
    """`values *= sqrt(moment + floor)`."""
    return values.mul_(root(moment, floor))


def root(moment: Tensor, floor: Tensor) -> Tensor:
    """`sqrt(moment + floor)`, rounded to nearest: torch's float32 root on the CPU is not, so it is taken in float64."""
    return torch.sqrt((moment + floor).double()).to(moment.dtype)
