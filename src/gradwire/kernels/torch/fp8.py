"""8-bit floats (e4m3) under the largest magnitude of their block."""

import torch
from torch import Tensor

from gradwire.kernels.torch.int8 import SMALLEST, blocks_of, parts_of

LARGEST = 448.0
INVERSE_LARGEST = 0.0022321426
"""Just below 1/448."""


def encode_(wire: Tensor, values: Tensor, block: int) -> Tensor:
    """Write codes and scales. The scale of a block with inf or NaN in it is NaN."""
    x_BK = blocks_of(values, block)
    codes, scales = parts_of(wire, x_BK.shape[0], block)
    scale = (x_BK.abs().amax(1, keepdim=True) * INVERSE_LARGEST).clamp(min=SMALLEST)
    finite = torch.isfinite(x_BK).all(1, keepdim=True)
    scaled = torch.where(finite, x_BK * scale.reciprocal(), 0.0).clamp(-LARGEST, LARGEST)
    codes.copy_(scaled.to(torch.float8_e4m3fn).view(torch.int8).view(-1))
    scales.copy_(torch.where(finite, scale, float("nan")).view(-1))
    return wire


def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """`out = alpha * values`, or `out += alpha * values`."""
    count = -(-out.numel() // block)
    codes, scales = parts_of(wire, count, block)
    wide = codes.view(torch.float8_e4m3fn).view(count, block).float()
    values = (wide * (scales * alpha).view(-1, 1)).view(-1).narrow(0, 0, out.numel())
    return out.add_(values) if add else out.copy_(values)
