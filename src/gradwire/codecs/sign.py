"""sign: one bit per value, times the mean magnitude of its block.

    [ signs, 8 values per byte: byte i of a block holds the values i, i + block/8, ... ][ B scales, float32 ]

Inf or NaN go into the scale of their block. 1.125 bits per value.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.base import BlockCodec


@dataclass(frozen=True, slots=True)
class Sign(BlockCodec):
    """Signs, one scale per block."""

    name: ClassVar[str] = "sign"
    exempts_small: ClassVar[bool] = True
    block: int = 256
    """Values that share a scale."""

    @property
    def bound(self) -> float:
        """The result is a projection, so it is never further away than 0."""
        return 1.0

    def wire_bytes(self, numel: int) -> int:
        """One bit per value and 4 bytes per block."""
        blocks = -(-numel // self.block)
        return -(-blocks * self.block // 32) * 4 + 4 * blocks

    def new_wire(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """With zeros in the padding before the scales too."""
        wire, signs = BlockCodec.new_wire(self, flat, out), -(-flat.numel() // self.block) * self.block // 8
        wire.narrow(0, signs, -signs % 4).zero_()
        return wire
