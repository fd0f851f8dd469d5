"""int2 to int6 in Triton. Tiles of blocks above 256 values do not fit into registers and use the torch kernels."""

from torch import Tensor, float32

from gradwire.kernels.grid import Grid
from gradwire.kernels.torch import levels as torch_levels
from gradwire.kernels.triton.calls import TritonBatch, encode_one, reduce_one, total_one
from gradwire.kernels.triton.coding import LARGEST_TILE, in_tiles
from gradwire.kernels.triton.launch import or_torch


@or_torch(torch_levels)
def encode_(wire: Tensor, values: Tensor, grid: Grid, seed: int = 0) -> Tensor:
    """See `gradwire.kernels.torch.levels`."""
    if grid.tile > LARGEST_TILE:
        return torch_levels.encode_(wire, values, grid, seed)
    encode_one(wire, values, in_tiles(grid), seed)
    return wire


@or_torch(torch_levels)
def decode_(out: Tensor, wire: Tensor, grid: Grid, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.levels`."""
    if grid.tile > LARGEST_TILE:
        return torch_levels.decode_(out, wire, grid, alpha, add)
    total_one(out, wire.view(1, -1), in_tiles(grid), alpha, add)
    return out


@or_torch(torch_levels)
def sum_(out: Tensor, wires: Tensor, grid: Grid, alpha: float) -> Tensor:
    """See `gradwire.kernels.torch.levels`, which rounds to the type of `out` after each wire."""
    if grid.tile > LARGEST_TILE or out.dtype != float32:
        return torch_levels.sum_(out, wires, grid, alpha)
    total_one(out, wires, in_tiles(grid), alpha)
    return out


@or_torch(torch_levels)
def reduce_(wire: Tensor, own: Tensor, wires: Tensor, skip: int, grid: Grid, alpha: float, seed: int = 0) -> Tensor:
    """See `gradwire.kernels.torch.levels`."""
    if grid.tile > LARGEST_TILE:
        return torch_levels.reduce_(wire, own, wires, skip, grid, alpha, seed)
    reduce_one(wire, own, wires, skip, in_tiles(grid), alpha, seed)
    return wire


def batch(grid: Grid, seed: int) -> TritonBatch | None:
    """All tensors of a message at once."""
    return None if grid.tile > LARGEST_TILE else TritonBatch(in_tiles(grid), seed)
