"""fp8: 8-bit floats with 4 bits of exponent and 3 of mantissa, under the largest magnitude of their block.

    [ B * block values, e4m3 ][ B scales, float32 ]

Small values keep their relative precision, which integers of the same width do not give them. 8.125 bits per value.
"""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs.base import BlockCodec


@dataclass(frozen=True, slots=True)
class FP8(BlockCodec):
    """e4m3, one scale per block."""

    name: ClassVar[str] = "fp8"
    block: int = 256
    """Values that share a scale."""

    @property
    def bound(self) -> float:
        """Half an ulp of 4 significant bits, and the step below the smallest normal number."""
        return 2.0**-4 + 2.0**-10 / 448 * float(self.block**0.5)

    def wire_bytes(self, numel: int) -> int:
        """One byte per value and 4 per block."""
        return -(-numel // self.block) * (self.block + 4)
