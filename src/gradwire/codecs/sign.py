"""sign: one bit per value, times the mean magnitude of its block.

    [ signs, 8 values per byte: byte i of a block holds the values i, i + block/8, ... ][ B scales, float32 ]

Inf or NaN go into the scale of their block. 1.125 bits per value.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.base import Codec, check_block
from gradwire.kernels import batched, pick
from gradwire.kernels.batch import Batch


@dataclass(frozen=True, slots=True)
class Sign(Codec):
    """Signs, one scale per block."""

    name: ClassVar[str] = "sign"
    exempts_small: ClassVar[bool] = True
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
        """The result is a projection, so it is never further away than 0."""
        return 1.0

    def wire_bytes(self, numel: int) -> int:
        """One bit per value and 4 bytes per block."""
        blocks = -(-numel // self.block)
        return -(-blocks * self.block // 32) * 4 + 4 * blocks

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Signs, and the mean magnitude."""
        wire, signs = self.new_wire(flat, out), -(-flat.numel() // self.block) * self.block // 8
        wire.narrow(0, signs, -signs % 4).zero_()  # the padding before the scales
        if flat.numel():
            pick("sign", flat).encode_(wire, flat, self.block)
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Plus or minus the scale."""
        if out.numel():
            pick("sign", out).decode_(out, wire, self.block, alpha, add)
        return out

    def batch(self, flat: Tensor) -> Batch | None:
        """All tensors of a message in one pass, where there are kernels for it."""
        return batched("sign", flat, self.block)
