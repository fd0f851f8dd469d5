"""whole_int8: integers from -127 to 127, scaled by the largest magnitude of all values or of rows of any length.

    [ R scales, float32 ][ numel codes, int8 ][ padding to 4 ]

R is 1 if all values share a scale. A row that holds inf or NaN has the scale NaN and is decoded as NaN. The codec is
not registered: only the drop-in quantization hooks use it, and `int8` is better at everything else.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Codec
from gradwire.errors import SpecError
from gradwire.kernels.torch.int8 import INVERSE_127, SMALLEST


@dataclass(frozen=True, slots=True)
class WholeInt8(Codec):
    """8-bit integers with one scale per row."""

    name: ClassVar[str] = "whole_int8"
    row: int | None = None
    """The number of values that share a scale; None: all of them."""

    def __post_init__(self) -> None:
        if self.row is not None and (type(self.row) is not int or self.row < 1):
            raise SpecError(f"{self.name}: row must be a whole number of at least 1, got {self.row!r}")

    @property
    def bound(self) -> float:
        """Half a step per value, in a row with one large value. The error of a value never exceeds the value."""
        return 1.001 * (1.0 if self.row is None else min(1.0, 0.5 / 127 * self.row**0.5))

    def wire_bytes(self, numel: int) -> int:
        """4 bytes per row and one per value, rounded up to 4."""
        return 4 * (self._rows(numel) + -(-numel // 4))

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Scale and round to nearest."""
        wire = self.new_wire(flat, out)
        if flat.numel():
            values, (scales, codes) = flat.float(), self._parts(wire, flat.numel())
            largest = self._largest(values)
            fine = (largest * INVERSE_127).clamp(min=SMALLEST)
            scales.copy_(torch.where(torch.isfinite(largest), fine, float("nan")))
            scaled = values * self._by_value(scales.reciprocal(), flat.numel())
            codes.copy_(scaled.round_().clamp_(-127, 127).nan_to_num_(0.0))
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Multiply by the scales, which already include `alpha`."""
        scales, codes = self._parts(wire, out.numel())
        values = codes.float() * self._by_value(scales * alpha, out.numel())
        return out.add_(values) if add else out.copy_(values)

    def _rows(self, numel: int) -> int:
        return min(numel, 1) if self.row is None else -(-numel // self.row)

    def _parts(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Scales and codes, as views of the wire."""
        begin = 4 * self._rows(numel)
        return wire.narrow(0, 0, begin).view(torch.float32), wire.narrow(0, begin, numel).view(torch.int8)

    def _width(self, numel: int) -> int:
        return numel if self.row is None else min(self.row, numel)

    def _largest(self, values: Tensor) -> Tensor:
        """The largest magnitude of each row; inf or NaN if the row holds one."""
        width = self._width(values.numel())
        missing = -values.numel() % width
        rows = (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, width)
        return torch.maximum(rows.amax(1), -rows.amin(1))

    def _by_value(self, by_row: Tensor, numel: int) -> Tensor:
        """Expand a number per row to what `numel` values are multiplied by."""
        if by_row.numel() == 1:
            return by_row
        return by_row.view(-1, 1).expand(-1, self._width(numel)).reshape(-1).narrow(0, 0, numel)
