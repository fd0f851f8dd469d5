"""8-bit integers under the largest magnitude of their block."""

import torch
from torch import Tensor

from gradwire.kernels.torch.bits import uniform

INVERSE_127 = 0.007874015
"""Just below 1/127, so that 127 times the scale never exceeds the largest magnitude."""
SMALLEST = 2.0**-126


def encode_(wire: Tensor, values: Tensor, block: int, stochastic: bool = False, seed: int = 0) -> Tensor:
    """Write codes and scales. The scale of a block with inf or NaN in it is NaN."""
    x_BK = blocks_of(values, block)
    codes, scales = parts_of(wire, x_BK.shape[0], block)
    scale = (x_BK.abs().amax(1, keepdim=True) * INVERSE_127).clamp(min=SMALLEST)
    finite = torch.isfinite(x_BK).all(1, keepdim=True)
    scaled = torch.where(finite, x_BK * scale.reciprocal(), 0.0)
    if stochastic:
        drawn = uniform(x_BK.numel(), 0, seed, values.device).view_as(x_BK)
        scaled = (scaled + drawn).floor()
    codes.copy_(scaled.round().clamp(-127, 127).view(-1))
    scales.copy_(torch.where(finite, scale, float("nan")).view(-1))
    return wire


def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """`out = alpha * values`, or `out += alpha * values`."""
    count = -(-out.numel() // block)
    codes, scales = parts_of(wire, count, block)
    values = (codes.view(count, block).float() * (scales * alpha).view(-1, 1)).view(-1).narrow(0, 0, out.numel())
    return out.add_(values) if add else out.copy_(values)


def sum_(out: Tensor, wires: Tensor, block: int, alpha: float) -> Tensor:
    """`out = alpha * (values of all wires)`, in the order of the wires."""
    for rank, wire in enumerate(wires):
        decode_(out, wire, block, alpha, rank > 0)
    return out


def reduce_(
    wire: Tensor, own: Tensor, wires: Tensor, skip: int, block: int, alpha: float, stochastic: bool, seed: int = 0
) -> Tensor:
    """Encode `alpha * (own + values of all wires but one)`."""
    mean = own.float() * alpha
    for rank, other in enumerate(wires):
        if rank != skip:
            decode_(mean, other, block, alpha, True)
    return encode_(wire, mean, block, stochastic, seed)


def blocks_of(values: Tensor, block: int) -> Tensor:
    """The values as float32 rows of `block`, with zeros behind the last."""
    return torch.nn.functional.pad(values.float(), (0, -values.numel() % block)).view(-1, block)


def parts_of(wire: Tensor, count: int, block: int) -> tuple[Tensor, Tensor]:
    """Codes and scales, as views of the wire."""
    codes = wire.narrow(0, 0, count * block).view(torch.int8)
    return codes, wire.narrow(0, count * block, 4 * count).view(torch.float32)
