"""fp16: half precision under one power-of-two scale, so that nothing overflows and little underflows.

    [ scale, float32 ][ numel halves, float16 ][ padding to 4 bytes ]

The scale puts the largest value just under 2**15. A value of 1e5 fits, and so does a gradient of 1e-8: the wire covers
39 binary orders of magnitude below the largest value. The scale is exact in both directions.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, new_total
from gradwire.kernels import batched, pick
from gradwire.kernels.batch import Batch


@dataclass(frozen=True, slots=True)
class FP16(Codec):
    """Half precision, 2 bytes per value."""

    name: ClassVar[str] = "fp16"
    wire_dtype: ClassVar[torch.dtype | None] = torch.float16

    @property
    def bound(self) -> float:
        """Half an ulp: 11 significant bits."""
        return 2.0**-11

    def wire_bytes(self, numel: int) -> int:
        """4 bytes of scale and 2 per value, rounded up to 4."""
        return 4 + 2 * (numel + numel % 2)

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Scale and round to nearest."""
        wire, numel = self.new_wire(flat, out), flat.numel()
        scale = pick("half", flat).half_scale(flat) if numel else torch.ones((), device=flat.device)
        _scale(wire).copy_(scale)
        pick("half", flat).to_fp16_(_halves(wire, numel), flat, scale.reciprocal())
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Undo the scale, and multiply by `alpha` in the same pass."""
        factor = _scale(wire) * alpha
        pick("half", out).from_fp16_(out, _halves(wire, out.numel()), factor, add)
        return out

    def sum_(self, out: Tensor, wires: Tensor, alpha: float) -> Tensor:
        """All wires in one pass."""
        pick("half", out).sum_fp16_(out, *_rows(wires, out.numel(), alpha))
        return out

    def reduce_(self, wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
        """Sum in one pass. Its scale is known only then."""
        halves, factors = _rows(wires, own.numel(), alpha)
        total = new_total(own)
        pick("half", own).reduced_fp16_(total, own, halves, skip, factors, alpha)
        return self.encode(total, out=wire)

    def batch(self, flat: Tensor) -> Batch | None:
        """All tensors of a message in one pass, where there are kernels for it."""
        return batched("half", flat, self.wire_dtype)


def _rows(wires: Tensor, numel: int, alpha: float) -> tuple[Tensor, Tensor]:
    """The halves on all wires, and the factor of each."""
    factors = wires.narrow(1, 0, 4).view(torch.float32).reshape(-1) * alpha
    return wires.narrow(1, 4, 2 * numel).view(torch.float16), factors


def _scale(wire: Tensor) -> Tensor:
    return wire.narrow(0, 0, 4).view(torch.float32).view(())


def _halves(wire: Tensor, numel: int) -> Tensor:
    return wire.narrow(0, 4, 2 * numel).view(torch.float16)
