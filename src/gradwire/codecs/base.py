"""Step 3: what a codec is. Values <-> bytes; pure, it never communicates."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gradwire.errors import SpecError
from gradwire.scratch import empty


class Codec(Protocol):
    """Turns a flat tensor into one uint8 wire whose size is known from the number of values alone.

    Implementations are frozen dataclasses whose fields are the options of the spec. They inherit from nothing,
    keep no state, touch no global random state, and never synchronise with an accelerator.
    """

    name: ClassVar[str]
    """The name in a spec."""
    wire_dtype: ClassVar[torch.dtype | None]
    """A number type that the backend can sum and that holds a value by itself; None if the wire is more than that."""

    @property
    def bound(self) -> float:
        """A promise: `|decode(encode(x)) - x| <= bound * |x|` (2-norms), for finite x in the normal range."""

    def wire_bytes(self, numel: int) -> int:
        """Length of the wire for `numel` values; a multiple of 4, so that wires can be laid side by side."""

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """The wire of `flat`, written to `out` where given. Inf and NaN must survive as inf or NaN."""

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """`out = alpha * values`, or `out += alpha * values`: the mean, the residual and the sum in one primitive."""


def decode(codec: Codec, wire: Tensor, numel: int) -> Tensor:
    """The `numel` values on `wire`, as float32."""
    check_wire(codec, wire, numel)
    return codec.decode_(torch.empty(numel, dtype=torch.float32, device=wire.device), wire)


def check_wire(codec: Codec, wire: Tensor, numel: int) -> None:
    """Refuse bytes that cannot be the wire of `numel` values."""
    expected = codec.wire_bytes(numel)
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != expected:
        raise SpecError(
            f"{codec.name}: the wire of {numel} values is {expected} bytes in a flat uint8 tensor, "
            f"got {tuple(wire.shape)} of {wire.dtype}"
        )


def new_wire(codec: Codec, flat: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a fresh wire for `flat`."""
    if out is not None:
        return out
    return empty((codec.wire_bytes(flat.numel()),), torch.uint8, flat.device)
