"""Coding: what a Triton kernel must know of a codec, as one compile-time constant."""

from typing import NamedTuple

import triton.language as tl

from gradwire.kernels.grid import TILE_BLOCKS, Grid

INT8, FP8, SIGN, LEVELS, TOPK, BF16, FP16 = (tl.constexpr(kind) for kind in range(7))
PROGRAM_VALUES = 4096
"""The number of values that one program of a kernel works on, unless a block or tile is larger."""
LARGEST_TILE = 4096
"""A tile of int2 to int6 must fit into the registers of one program."""


class Coding(NamedTuple):
    """Everything but the numbers that change from call to call. A program works on `rows` blocks."""

    kind: int
    rows: int
    block: int
    stochastic: bool = False
    kept: int = 0
    """topk: the number of values per block."""
    bits: int = 0
    """int2 to int6: the fields of `gradwire.kernels.grid.Grid`."""
    base: int = 0
    widest: float = 0.0
    fit: bool = False
    hadamard: int = 0
    inverse_top: float = 0.0
    e0: float = 0.0
    e1: float = 0.0
    e2: float = 0.0
    e3: float = 0.0
    d0: float = 0.0
    d1: float = 0.0
    d2: float = 0.0
    d3: float = 0.0

    @property
    def values(self) -> int:
        """The number of values that a program works on."""
        return self.rows * self.block

    @property
    def warps(self) -> int:
        """16 values per thread of a warp of 32, or 8 where a value takes several registers."""
        return max(1, self.values // (256 if self.kind in (LEVELS.value, TOPK.value) else 512))


def in_blocks(kind: tl.constexpr, block: int, *, stochastic: bool = False, kept: int = 0) -> Coding:
    """int8, fp8, sign and topk: as many blocks as make up a program's share."""
    return Coding(kind.value, max(1, PROGRAM_VALUES // block), block, stochastic, kept)


def in_halves(kind: tl.constexpr) -> Coding:
    """bf16 and fp16, which have no blocks."""
    return Coding(kind.value, 1, PROGRAM_VALUES)


def in_tiles(grid: Grid) -> Coding:
    """int2 to int6: a program works on a tile."""
    return Coding(
        LEVELS.value,
        TILE_BLOCKS,
        grid.block,
        grid.stochastic,
        0,
        grid.bits,
        grid.base,
        grid.widest,
        grid.fit,
        grid.hadamard,
        1.0 / grid.top,
        *grid.encoder,
        *grid.decoder,
    )
