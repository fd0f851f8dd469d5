"""What the kernels of int2 to int6 share: the grid of levels, and where everything lies on the wire.

A tile is 16 blocks. Its exponent byte is the binade of its largest value. The scale byte of a block is the distance of
its scale from there, in 16ths of a binade. The codes of a tile lie in bit planes, so that packing is contiguous:

    plane of 4 bits   byte i of n/2: value i | value i + n/2 << 4
    plane of 2 bits   byte i of n/4: value i | value i + n/4 << 2 | value i + n/2 << 4 | ...
    plane of 1 bit    byte i of n/8: in the same way
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

TILE_BLOCKS = 16
PLANES = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),), 5: ((4, 0), (1, 4)), 6: ((4, 0), (2, 4))}
"""Width of the code -> its planes: (bits, the lowest bit of the code that they hold)."""
REACH = 1.032
"""The largest value in units of the scale: scales are rounded to 4 bits of mantissa."""
ZERO, NONFINITE = 255, 255
"""Scale byte of a block of zeros; exponent byte of a tile with inf or NaN in it."""


class Grid(NamedTuple):
    """How values become codes. `encoder` and `decoder` are odd polynomials, see `gradwire.codecs.codebooks`."""

    bits: int
    block: int
    encoder: tuple[float, ...]
    decoder: tuple[float, ...]
    widest: float = 0.0
    """The scale of a block is this many times its RMS; 0: it is the largest magnitude."""
    fit: bool = False
    """Once the codes are known, take the scale that fits them best."""
    hadamard: int = 0
    """The number of values that a Hadamard rotation mixes first; 0: no rotation."""
    stochastic: bool = False
    """Stochastic rounding: up or down at random, so that the error is 0 on average."""

    @property
    def tile(self) -> int:
        """Values in a tile."""
        return TILE_BLOCKS * self.block

    @property
    def base(self) -> int:
        """The level (16ths of a binade) that scale byte 0 stands for, when the tile's largest value is in [1, 2).

        A rotation, a scale of several RMS and a largest level below 1 can each need a scale above the largest value.
        """
        above = (4 if self.hadamard else 0) + (2 if self.widest else 0) + (1 if self.stochastic else 0)
        return (128 + above) << 4

    @property
    def top(self) -> float:
        """The largest magnitude there is a level for."""
        t = 2.0 ** (self.bits - 1) - 0.5
        return float(sum(d * t ** (2 * i + 1) for i, d in enumerate(self.decoder)))

    def layout(self, numel: int) -> TileLayout:
        """Where the parts of the wire of `numel` values are."""
        unit = max(self.block, self.hadamard)
        padded = -(-numel // unit) * unit
        return TileLayout(self, numel, padded, padded // self.block, -(-padded // self.tile))


class TileLayout(NamedTuple):
    """The sizes of one wire."""

    grid: Grid
    numel: int
    padded: int
    """Values with padding, whole blocks."""
    blocks: int
    tiles: int

    @property
    def wire_bytes(self) -> int:
        """All of it, rounded up to 4 bytes."""
        return -(-(self.tiles + self.blocks + self.code_bytes(self.padded)) // 4) * 4

    def code_bytes(self, numel: int) -> int:
        """Bytes for the codes of `numel` values."""
        return numel * self.grid.bits // 8

    def planes(self, wire: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exponents, scales and codes, as views of the wire."""
        return (
            wire.narrow(0, 0, self.tiles),
            wire.narrow(0, self.tiles, self.blocks),
            wire.narrow(0, self.tiles + self.blocks, self.code_bytes(self.padded)),
        )

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Tiles of equal width: (first tile, how many, values in each): the whole ones, then a shorter last one."""
        whole = self.padded // self.grid.tile
        if whole:
            yield 0, whole, self.grid.tile
        if self.tiles > whole:
            yield whole, 1, self.padded - whole * self.grid.tile
