"""8-bit integers in Triton."""

from torch import Tensor, float32

from gradwire.kernels.torch import int8 as torch_int8
from gradwire.kernels.triton.calls import TritonBatch, encode_one, reduce_one, total_one
from gradwire.kernels.triton.coding import INT8, Coding, in_blocks
from gradwire.kernels.triton.launch import or_torch


@or_torch(torch_int8)
def encode_(wire: Tensor, values: Tensor, block: int, stochastic: bool = False, seed: int = 0) -> Tensor:
    """See `gradwire.kernels.torch.int8`."""
    encode_one(wire, values, _coding(block, stochastic), seed)
    return wire


@or_torch(torch_int8)
def decode_(out: Tensor, wire: Tensor, block: int, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.int8`."""
    total_one(out, wire.view(1, -1), _coding(block), alpha, add)
    return out


@or_torch(torch_int8)
def sum_(out: Tensor, wires: Tensor, block: int, alpha: float) -> Tensor:
    """See `gradwire.kernels.torch.int8`, which rounds to the type of `out` after each wire."""
    if out.dtype != float32:
        return torch_int8.sum_(out, wires, block, alpha)
    total_one(out, wires, _coding(block), alpha)
    return out


@or_torch(torch_int8)
def reduce_(
    wire: Tensor, own: Tensor, wires: Tensor, skip: int, block: int, alpha: float, stochastic: bool, seed: int = 0
) -> Tensor:
    """See `gradwire.kernels.torch.int8`."""
    reduce_one(wire, own, wires, skip, _coding(block, stochastic), alpha, seed)
    return wire


def batch(block: int, stochastic: bool, seed: int) -> TritonBatch:
    """All tensors of a message at once."""
    return TritonBatch(_coding(block, stochastic), seed)


def _coding(block: int, stochastic: bool = False) -> Coding:
    return in_blocks(INT8, block, stochastic=stochastic)
