"""The largest values of each block, in Triton. Decoding takes one step per kept value, so it suits small ratios."""

from torch import Tensor

from gradwire.kernels.torch import topk as torch_topk
from gradwire.kernels.triton.calls import TritonBatch, encode_one, total_one
from gradwire.kernels.triton.coding import TOPK, in_blocks
from gradwire.kernels.triton.launch import or_torch


@or_torch(torch_topk)
def encode_(wire: Tensor, values: Tensor, block: int, kept: int) -> Tensor:
    """See `gradwire.kernels.torch.topk`."""
    encode_one(wire, values, in_blocks(TOPK, block, kept=kept))
    return wire


@or_torch(torch_topk)
def decode_(out: Tensor, wire: Tensor, block: int, kept: int, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.topk`."""
    total_one(out, wire.view(1, -1), in_blocks(TOPK, block, kept=kept), alpha, add)
    return out


def batch(block: int, kept: int) -> TritonBatch:
    """All tensors of a message at once."""
    return TritonBatch(in_blocks(TOPK, block, kept=kept))
