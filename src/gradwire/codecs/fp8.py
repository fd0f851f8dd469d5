"""fp8: 8-bit floats with 4 bits of exponent and 3 of mantissa, under the largest magnitude of their block.

    [ B * block values, e4m3 ][ B scales, float32 ]

Small values keep their relative precision, which integers of the same width do not give them. 8.125 bits per value.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.base import Codec, check_block
from gradwire.kernels import batched, pick
from gradwire.kernels.batch import Batch


@dataclass(frozen=True, slots=True)
class FP8(Codec):
    """e4m3, one scale per block."""

    name: ClassVar[str] = "fp8"
    block: int = 256
    """Values that share a scale."""

    def __post_init__(self) -> None:
        check_block(self.name, self.block)

    @property
    def align(self) -> int:
        """Whole blocks."""
        return self.block

    @property
    def bound(self) -> float:
        """Half an ulp of 4 significant bits, and the step below the smallest normal number."""
        return 2.0**-4 + 2.0**-10 / 448 * float(self.block**0.5)

    def wire_bytes(self, numel: int) -> int:
        """One byte per value and 4 per block."""
        return -(-numel // self.block) * (self.block + 4)

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Scale and round to nearest."""
        wire = self.new_wire(flat, out)
        if flat.numel():
            pick("fp8", flat).encode_(wire, flat, self.block)
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Undo the scale."""
        if out.numel():
            pick("fp8", out).decode_(out, wire, self.block, alpha, add)
        return out

    def batch(self, flat: Tensor) -> Batch | None:
        """All tensors of a message in one pass, where there are kernels for it."""
        return batched("fp8", flat, self.block)
