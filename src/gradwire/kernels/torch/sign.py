"""One bit per value: its sign, times the mean magnitude of its block."""

import torch
from torch import Tensor

from gradwire.kernels.torch.bits import tree_sum
from gradwire.kernels.torch.int8 import blocks_of
from gradwire.kernels.torch.levels import pack, unpack


def encode_(wire: Tensor, values: Tensor, block: int) -> Tensor:
    """Write signs (1 for negative) and scales. Inf and NaN go into the scale."""
    x_BK = blocks_of(values, block)
    signs, scales = parts_of(wire, x_BK.shape[0], block)
    negative = (x_BK.view(torch.int32) < 0).to(torch.uint8)
    signs.copy_(pack(negative, 1).view(-1))
    scales.copy_(tree_sum(x_BK.abs() * shares(values, x_BK)).view(-1))
    return wire


def shares(values: Tensor, x_BK: Tensor) -> Tensor:
    """1 / (values in the block): the last one may have fewer."""
    count, block = x_BK.shape
    present = (values.numel() - block * torch.arange(count, device=values.device)).clamp(max=block)
    return present.double().reciprocal().float().view(-1, 1)


def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """`out = alpha * values`, or `out += alpha * values`."""
    count = -(-out.numel() // block)
    signs, scales = parts_of(wire, count, block)
    factors = 1.0 - 2.0 * unpack(signs.view(count, -1), 1).float()
    values = (factors * (scales * alpha).view(-1, 1)).view(-1).narrow(0, 0, out.numel())
    return out.add_(values) if add else out.copy_(values)


def parts_of(wire: Tensor, count: int, block: int) -> tuple[Tensor, Tensor]:
    """Signs and scales, as views of the wire."""
    at = count * block // 8
    return wire.narrow(0, 0, at), wire.narrow(0, -(-at // 4) * 4, 4 * count).view(torch.float32)
