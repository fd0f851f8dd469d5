"""int6, int5, int4, int3, int2: a few levels, spaced to fit gradients, under a one-byte scale for each block.

    [ exponents, one byte per 16 blocks ][ scales, one byte per block ][ codes ][ padding to 4 bytes ]

The exponent is the binade of the largest value of 16 blocks, or 255 where one of them is inf or NaN, and all come back
as NaN. A scale byte is the distance from there in 16ths of a binade, so 4.13 bits per value pay for everything at
4 bits. Codes lie in bit planes (`gradwire.kernels.grid`), levels are polynomials (`gradwire.codecs.codebooks`).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from torch import Tensor, compiler

from gradwire.codecs.base import check_block, zero_end_
from gradwire.codecs.codebooks import TRAINED, codebook
from gradwire.codecs.int8 import Rounding, RoundingCodec
from gradwire.errors import SpecError
from gradwire.kernels import batched, pick
from gradwire.kernels.batch import Batch
from gradwire.kernels.grid import REACH, TILE_BLOCKS, Grid
from gradwire.spec import coerce

Kind = Literal["trained", "lloyd", "uniform"]
Group = Literal[0, 64, 128, 256]


@dataclass(frozen=True, slots=True)
class Levels(RoundingCodec):
    """The base class of int2 to int6, which differ in their width and defaults."""

    name: ClassVar[str]
    bits: ClassVar[int]
    allocatable_bits: ClassVar[int]
    exempts_small: ClassVar[bool] = True
    block: int = 64
    """Values that share a scale."""
    codebook: Kind = "trained"
    """`trained`: for the largest magnitude of normal blocks. `lloyd`: Lloyd-Max on the RMS. `uniform`: equal steps."""
    hadamard: Group = 0
    """The number of values that a Hadamard rotation mixes first, which spreads outliers; 0: no rotation."""
    rounding: Rounding = "nearest"
    """`stochastic`: up or down at random, so that the error is 0 on average, at twice the squared error."""
    seed: int = 0
    """For stochastic rounding; hooks mix in rank, step and bucket."""

    def __post_init__(self) -> None:
        check_block(self.name, self.block)
        for option, kind in (("codebook", Kind), ("hadamard", Group), ("rounding", Rounding)):
            coerce(f"{self.name}: {option}", getattr(self, option), kind)
        if self.codebook != "uniform" and (self.codebook, self.bits) not in TRAINED:
            kinds = [kind for kind, bits in TRAINED if bits == self.bits]
            raise SpecError(
                f"{self.name}: codebook must be one of {', '.join([*kinds, 'uniform'])}, got {self.codebook}"
            )
        if self.hadamard > TILE_BLOCKS * self.block:
            raise SpecError(
                f"{self.name}: hadamard={self.hadamard} needs blocks of {self.hadamard // TILE_BLOCKS} values or more, "
                f"got block={self.block}"
            )

    @property
    def grid(self) -> Grid:
        """What the kernels need."""
        make = _grid if compiler.is_compiling() else _kept_grid  # the compiler warns of caches
        return make(self.bits, self.block, self.codebook, self.hadamard, self.is_random)

    @property
    def align(self) -> int:
        """Whole blocks, and whole groups of the rotation."""
        return max(self.block, self.hadamard)

    @property
    def bound(self) -> float:
        """The lowest level for every value, relative to a block with one large value; 1 with a fitted scale."""
        if self.codebook == "lloyd" and self.rounding == "nearest":
            return 1.0
        grid = self.grid
        lowest = sum(d * 0.5 ** (2 * i + 1) for i, d in enumerate(grid.decoder))
        worst = 2 * lowest if grid.stochastic else lowest
        return float(min(1.2 * REACH / min(1.0, grid.top) * worst * self.block**0.5 + abs(1.0 - grid.top), 4.0))

    def wire_bytes(self, numel: int) -> int:
        """See the drawing above."""
        return self.grid.layout(numel).wire_bytes

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Scale and pick levels."""
        wire = self.new_wire(flat, out)
        if flat.numel():
            pick("levels", flat).encode_(wire, flat, self.grid, self.seed)
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Look up levels and undo the scale."""
        if out.numel():
            pick("levels", out).decode_(out, wire, self.grid, alpha, add)
        return out

    def sum_(self, out: Tensor, wires: Tensor, alpha: float) -> Tensor:
        """All wires in one pass."""
        pick("levels", out).sum_(out, wires, self.grid, alpha)
        return out

    def reduce_(self, wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
        """Sum and encode in one pass."""
        zero_end_(wire)
        pick("levels", own).reduce_(wire, own, wires, skip, self.grid, alpha, self.seed)
        return wire

    def batch(self, flat: Tensor) -> Batch | None:
        """All tensors of a message in one pass, where there are kernels for it."""
        return batched("levels", flat, self.grid, self.seed)


def _grid(bits: int, block: int, kind: str, hadamard: int, stochastic: bool) -> Grid:
    book = codebook(kind, bits)
    by_rms = kind == "lloyd" and not stochastic  # with stochastic rounding no value may lie beyond the last level
    return Grid(
        bits=bits,
        block=block,
        encoder=book.encoder,
        decoder=book.decoder,
        widest=book.widest if by_rms else 0.0,
        fit=by_rms,
        hadamard=hadamard,
        stochastic=stochastic,
    )


_kept_grid = lru_cache(maxsize=256)(_grid)


class Int6(Levels):
    """64 levels."""

    __slots__ = ()
    name, bits, allocatable_bits = "int6", 6, 6


class Int5(Levels):
    """32 levels."""

    __slots__ = ()
    name, bits, allocatable_bits = "int5", 5, 5


class Int4(Levels):
    """16 levels."""

    __slots__ = ()
    name, bits, allocatable_bits = "int4", 4, 4


class Int3(Levels):
    """8 levels."""

    __slots__ = ()
    name, bits, allocatable_bits = "int3", 3, 3


@dataclass(frozen=True, slots=True)
class Int2(Levels):
    """4 levels, Lloyd-Max on the RMS, with the scale that fits best."""

    name: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2
    allocatable_bits: ClassVar[int] = 2
    codebook: Kind = "lloyd"
