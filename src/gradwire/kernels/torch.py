"""The kernels in torch operations: any device, any floating type, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.scratch import temp


def half_scale(values: Tensor) -> Tensor:
    """See `gradwire.kernels`."""
    low, high = torch.aminmax(values)
    largest = torch.maximum(high, -low).float()
    exponent = torch.frexp(largest).exponent.clamp(-111, 128)
    scale = torch.ldexp(torch.ones_like(largest), exponent - 15)
    return torch.where(torch.isfinite(largest), scale, torch.ones_like(scale))


def to_fp16_(out: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """See `gradwire.kernels`."""
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return torch.mul(wide, factor.to(wide.dtype), out=out)


def from_fp16_(out: Tensor, halves: Tensor, factor: Tensor, add: bool) -> Tensor:
    """See `gradwire.kernels`."""
    if not add and out.dtype in (torch.float32, torch.float64):
        return out.copy_(halves).mul_(factor)
    values = _widened(halves).mul_(factor)
    return out.add_(values) if add else out.copy_(values)


def to_bf16_(out: Tensor, values: Tensor) -> Tensor:
    """See `gradwire.kernels`."""
    return out.copy_(values)


def from_bf16_(out: Tensor, values: Tensor, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels`."""
    if add:
        return out.add_(_widened(values).mul_(alpha))
    return out.copy_(values) if alpha == 1.0 else out.copy_(_widened(values).mul_(alpha))


def _widened(values: Tensor) -> Tensor:
    return temp(values.shape, torch.float32, values.device).copy_(values)
