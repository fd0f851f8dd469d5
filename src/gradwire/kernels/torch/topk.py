"""The largest values of each block, with their positions."""

import torch
from torch import Tensor

from gradwire.kernels.torch.bits import magnitude_of
from gradwire.kernels.torch.int8 import blocks_of


def encode_(wire: Tensor, values: Tensor, block: int, kept: int) -> Tensor:
    """Write the `kept` largest of each block (of equals, the first), in the order of their positions."""
    x_BK = blocks_of(values, block)
    places, bits = parts_of(wire, x_BK.shape[0], kept)
    order = torch.arange(block - 1, -1, -1, dtype=torch.int64, device=values.device)
    keys = magnitude_of(x_BK).to(torch.int64) * block + order
    found = torch.topk(keys, kept, dim=1, sorted=False).indices.sort(dim=1).values
    places.copy_(found.view(-1))
    bits.copy_(x_BK.gather(1, found).view(-1))
    return wire


def decode_(out: Tensor, wire: Tensor, block: int, kept: int, alpha: float, add: bool) -> Tensor:
    """`out = alpha * values`, or `out += alpha * values`."""
    count = -(-out.numel() // block)
    places, bits = parts_of(wire, count, kept)
    empty = -0.0 if add else 0.0  # adding -0 changes nothing, not even a -0
    dense = torch.full((count, block), empty, dtype=torch.float32, device=wire.device)
    inside = places.view(count, kept).to(torch.int64) & (block - 1)  # of a damaged wire too: a GPU would abort
    dense.scatter_(1, inside, (bits.float() * alpha).view(count, kept))
    values = dense.view(-1).narrow(0, 0, out.numel())
    return out.add_(values) if add else out.copy_(values + 0.0)


def parts_of(wire: Tensor, count: int, kept: int) -> tuple[Tensor, Tensor]:
    """Positions and values, as views of the wire."""
    size = 2 * count * kept
    return wire.narrow(0, 0, size).view(torch.int16), wire.narrow(0, size, size).view(torch.bfloat16)
