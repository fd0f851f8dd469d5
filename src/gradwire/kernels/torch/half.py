"""fp16 and bf16: casts under a factor."""

import torch
from torch import Tensor

from gradwire.kernels.memory import temp


def half_scale(values: Tensor) -> Tensor:
    """The power of two that brings the largest magnitude into [2**14, 2**15); 1 where a value is inf or NaN.

    A 0-dim float32 tensor, at least 2**-126, so that it and its reciprocal are exact.
    """
    low, high = torch.aminmax(values)
    largest = torch.maximum(high, -low).float()
    exponent = torch.frexp(largest).exponent.clamp(-111, 128)
    scale = torch.ldexp(torch.ones_like(largest), exponent - 15)
    return torch.where(torch.isfinite(largest), scale, torch.ones_like(scale))


def to_fp16_(out: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """`out = half(values * factor)`, rounded to nearest; `factor` is a 0-dim tensor."""
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return torch.mul(wide, factor.to(wide.dtype), out=out)


def from_fp16_(out: Tensor, halves: Tensor, factor: Tensor, add: bool) -> Tensor:
    """`out = halves * factor`, or `out += halves * factor`."""
    if not add and out.dtype in (torch.float32, torch.float64):
        return out.copy_(halves).mul_(factor)
    values = _widened(halves).mul_(factor)
    return out.add_(values) if add else out.copy_(values)


def to_bf16_(out: Tensor, values: Tensor) -> Tensor:
    """`out = bfloat16(values)`, rounded to nearest."""
    return out.copy_(values)


def from_bf16_(out: Tensor, values: Tensor, alpha: float, add: bool) -> Tensor:
    """`out = values * alpha`, or `out += values * alpha`."""
    if add:
        return out.add_(_widened(values).mul_(alpha))
    return out.copy_(values) if alpha == 1.0 else out.copy_(_widened(values).mul_(alpha))


def sum_bf16_(out: Tensor, wires: Tensor, alpha: float) -> Tensor:
    """`out = alpha * (values of all rows)`, in the order of the rows."""
    for rank, values in enumerate(wires):
        from_bf16_(out, values, alpha, rank > 0)
    return out


def sum_fp16_(out: Tensor, wires: Tensor, factors: Tensor) -> Tensor:
    """`out = sum(row * its factor)`, in the order of the rows."""
    for rank, (halves, factor) in enumerate(zip(wires, factors, strict=True)):
        from_fp16_(out, halves, factor, rank > 0)
    return out


def reduced_fp16_(out: Tensor, own: Tensor, wires: Tensor, skip: int, factors: Tensor, alpha: float) -> Tensor:
    """`out = alpha * own + sum(row * its factor)` over all rows but one, in their order."""
    out.copy_(own).mul_(alpha)  # own * alpha would be rounded to the type of own
    for rank, (halves, factor) in enumerate(zip(wires, factors, strict=True)):
        if rank != skip:
            from_fp16_(out, halves, factor, True)
    return out


def reduce_bf16_(wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
    """`wire = bfloat16(alpha * (own + values of all rows but one))`."""
    mean = own * alpha if own.dtype in (torch.float32, torch.float64) else own.float() * alpha
    for rank, values in enumerate(wires):
        if rank != skip:
            from_bf16_(mean, values, alpha, True)
    return to_bf16_(wire, mean)


def _widened(values: Tensor) -> Tensor:
    return temp(values.shape, torch.float32, values.device).copy_(values)
