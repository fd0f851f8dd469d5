"""topk: only the largest values of each block, with their positions.

    [ B * kept positions in the block, int16 ][ B * kept values, bfloat16 ]

Choosing within blocks costs a few passes over memory where a sort costs dozens, and makes the size of the wire known.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.base import Codec, check_block
from gradwire.errors import SpecError
from gradwire.kernels import batched, pick
from gradwire.kernels.batch import Batch


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """The largest `ratio` of each block. Use it with feedback, or most of the gradient is never applied."""

    name: ClassVar[str] = "topk"
    exempts_small: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = True
    ratio: float = 0.01
    """The part of the values that is sent, above 0 and up to 1; at least one value per block."""
    block: int = 1024
    """Values that are compared with each other."""

    def __post_init__(self) -> None:
        check_block(self.name, self.block)
        if not isinstance(self.ratio, (int, float)) or not 0 < self.ratio <= 1:
            raise SpecError(f"topk: ratio must be in (0, 1], got {self.ratio}")

    @property
    def kept(self) -> int:
        """The number of values sent per block."""
        return max(1, round(self.ratio * self.block))

    @property
    def align(self) -> int:
        """Whole blocks."""
        return self.block

    @property
    def bound(self) -> float:
        """What is not sent is lost, and half an ulp of bfloat16 of what is sent."""
        return float((1.0 - self.kept / self.block) ** 0.5 + 2.0**-8)

    def wire_bytes(self, numel: int) -> int:
        """4 bytes for each value that is sent."""
        return -(-numel // self.block) * self.kept * 4

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Choose the largest values of each block."""
        wire = self.new_wire(flat, out)
        if flat.numel():
            pick("topk", flat).encode_(wire, flat, self.block, self.kept)
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Put the values where they were; 0 elsewhere."""
        if out.numel():
            pick("topk", out).decode_(out, wire, self.block, self.kept, alpha, add)
        return out

    def batch(self, flat: Tensor) -> Batch | None:
        """All tensors of a message in one pass, where there are kernels for it."""
        return batched("topk", flat, self.block, self.kept)
