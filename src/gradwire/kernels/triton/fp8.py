"""8-bit floats in Triton."""

from torch import Tensor

from gradwire.kernels.torch import fp8 as torch_fp8
from gradwire.kernels.triton.calls import TritonBatch, encode_one, total_one
from gradwire.kernels.triton.coding import FP8, in_blocks
from gradwire.kernels.triton.launch import or_torch


@or_torch(torch_fp8)
def encode_(wire: Tensor, values: Tensor, block: int) -> Tensor:
    """See `gradwire.kernels.torch.fp8`."""
    encode_one(wire, values, in_blocks(FP8, block))
    return wire


@or_torch(torch_fp8)
def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.fp8`."""
    total_one(out, wire.view(1, -1), in_blocks(FP8, block), alpha, add)
    return out


def batch(block: int) -> TritonBatch:
    """All tensors of a message at once."""
    return TritonBatch(in_blocks(FP8, block))
