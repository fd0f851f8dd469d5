"""int8: whole numbers from -127 to 127, under the largest magnitude of their block.

    [ B * block codes, int8 ][ B scales, float32 ]

A block with inf or NaN in it has the scale NaN, and comes back as NaN. 8.125 bits per value.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from gradwire.codecs.base import Codec, check_block, mixed
from gradwire.kernels import batched, pick
from gradwire.kernels.batch import Batch
from gradwire.spec import coerce

Rounding = Literal["nearest", "stochastic"]


class RoundingCodec(Codec):
    """A codec that may round stochastically: a dataclass with these fields."""

    __slots__ = ()
    rounding: Rounding
    seed: int

    @property
    def is_random(self) -> bool:
        """With stochastic rounding."""
        return self.rounding == "stochastic"

    def seeded(self, *salt: object) -> Self:
        """With a seed of its own, if it rounds stochastically."""
        return dataclasses.replace(self, seed=mixed(self.seed, *salt)) if self.is_random else self  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Int8(RoundingCodec):
    """8-bit integers, one scale per block."""

    name: ClassVar[str] = "int8"
    block: int = 256
    """Values that share a scale."""
    rounding: Rounding = "nearest"
    """`stochastic`: up or down at random, so that the error is 0 on average, at twice the squared error."""
    seed: int = 0
    """For stochastic rounding; hooks mix in rank, step and bucket."""

    def __post_init__(self) -> None:
        check_block(self.name, self.block)
        coerce(f"{self.name}: rounding", self.rounding, Rounding)

    @property
    def align(self) -> int:
        """Whole blocks."""
        return self.block

    @property
    def bound(self) -> float:
        """Half a step per value (a whole one with stochastic rounding), relative to a block with one large value."""
        step = 1.0 if self.rounding == "nearest" else 2.0
        return float(0.5 * step / 127 * self.block**0.5 * 1.001)

    def wire_bytes(self, numel: int) -> int:
        """One byte per value and 4 per block."""
        return -(-numel // self.block) * (self.block + 4)

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Scale and round. There is no padding to clear, as whole blocks are a multiple of 4 bytes."""
        wire = self.new_wire(flat) if out is None else out
        if flat.numel():
            pick("int8", flat).encode_(wire, flat, self.block, self.rounding == "stochastic", self.seed)
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Undo the scale."""
        if out.numel():
            pick("int8", out).decode_(out, wire, self.block, alpha, add)
        return out

    def sum_(self, out: Tensor, wires: Tensor, alpha: float) -> Tensor:
        """All wires in one pass."""
        pick("int8", out).sum_(out, wires, self.block, alpha)
        return out

    def reduce_(self, wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
        """Sum and encode in one pass."""
        how = self.block, alpha, self.rounding == "stochastic", self.seed
        pick("int8", own).reduce_(wire, own, wires, skip, *how)
        return wire

    def batch(self, flat: Tensor) -> Batch | None:
        """All tensors of a message in one pass, where there are kernels for it."""
        return batched("int8", flat, self.block, self.rounding == "stochastic", self.seed)
