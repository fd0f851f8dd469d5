"""bf16: the upper half of a float32, rounded to nearest.

    [ numel values, bfloat16 ][ padding to 4 bytes ]

The range is float32's own, so there is no scale. Magnitudes above 3.39e38, the last 0.4% of it, round to inf.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, zero_end_
from gradwire.kernels import batched, pick
from gradwire.kernels.batch import Batch


@dataclass(frozen=True, slots=True)
class BF16(Codec):
    """Brain floating point, 2 bytes per value."""

    name: ClassVar[str] = "bf16"
    wire_dtype: ClassVar[torch.dtype | None] = torch.bfloat16

    @property
    def bound(self) -> float:
        """Half an ulp: 8 significant bits."""
        return 2.0**-8

    def wire_bytes(self, numel: int) -> int:
        """2 bytes per value, rounded up to 4."""
        return 2 * (numel + numel % 2)

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Round to nearest."""
        wire = self.new_wire(flat, out)
        pick("half", flat).to_bf16_(_values(wire, flat.numel()), flat)
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Widen and scale."""
        pick("half", out).from_bf16_(out, _values(wire, out.numel()), alpha, add)
        return out

    def sum_(self, out: Tensor, wires: Tensor, alpha: float) -> Tensor:
        """All wires in one pass."""
        pick("half", out).sum_bf16_(out, _rows(wires, out.numel()), alpha)
        return out

    def reduce_(self, wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
        """Sum and round in one pass."""
        zero_end_(wire)
        pick("half", own).reduce_bf16_(_values(wire, own.numel()), own, _rows(wires, own.numel()), skip, alpha)
        return wire

    def batch(self, flat: Tensor) -> Batch | None:
        """All tensors of a message in one pass, where there are kernels for it."""
        return batched("half", flat, self.wire_dtype)


def _rows(wires: Tensor, numel: int) -> Tensor:
    return wires.narrow(1, 0, 2 * numel).view(torch.bfloat16)


def _values(wire: Tensor, numel: int) -> Tensor:
    return wire.narrow(0, 0, 2 * numel).view(torch.bfloat16)
