"""One bit per value in Triton."""

from torch import Tensor

from gradwire.kernels.torch import sign as torch_sign
from gradwire.kernels.triton.calls import TritonBatch, encode_one, total_one
from gradwire.kernels.triton.coding import SIGN, in_blocks
from gradwire.kernels.triton.launch import or_torch


@or_torch(torch_sign)
def encode_(wire: Tensor, values: Tensor, block: int) -> Tensor:
    """See `gradwire.kernels.torch.sign`."""
    encode_one(wire, values, in_blocks(SIGN, block))
    return wire


@or_torch(torch_sign)
def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.sign`."""
    total_one(out, wire.view(1, -1), in_blocks(SIGN, block), alpha, add)
    return out


def batch(block: int) -> TritonBatch:
    """All tensors of a message at once."""
    return TritonBatch(in_blocks(SIGN, block))
