"""Step 3: what a codec is. Values <-> bytes; pure, it never communicates."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from gradwire.errors import SpecError
from gradwire.scratch import empty


class Codec(Protocol):
    """Turns a flat tensor into one uint8 wire whose size is known from the number of values alone.

    Implementations are frozen dataclasses whose fields are the options of the spec. They inherit from nothing,
    keep no state, touch no global random state, and never synchronise with an accelerator. Two optional methods save
    passes over memory, see `Fused`.
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


class Fused(Protocol):
    """What a codec may offer besides: the same results, bit for bit, with fewer passes over memory."""

    def sum_(self, out: Tensor, wires: Tensor, alpha: float) -> Tensor:
        """`out = alpha * values` of the first wire, `+= alpha * values` of the others."""

    def reduce_(self, wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
        """Encode `alpha * own`, `+= alpha * values` of all wires but one."""


def sum_(codec: Codec, out: Tensor, wires: Tensor, alpha: float) -> Tensor:
    """Add up what is on all wires, in their order."""
    if hasattr(codec, "sum_"):
        return cast(Fused, codec).sum_(out, wires, alpha)
    for rank, wire in enumerate(wires):
        codec.decode_(out, wire, alpha=alpha, add=rank > 0)
    return out


def reduce_(codec: Codec, wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> None:
    """Encode the sum of one's own values and of what is on all wires but one's own."""
    if hasattr(codec, "reduce_"):
        cast(Fused, codec).reduce_(wire, own, wires, skip, alpha)
    else:
        codec.encode(reduced(codec, own, wires, skip, alpha), out=wire)


def reduced(codec: Codec, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
    """The sum that `reduce_` encodes."""
    total = torch.mul(own, alpha, out=new_total(own))
    for rank, other in enumerate(wires):
        if rank != skip:
            codec.decode_(total, other, alpha=alpha, add=True)
    return total


def new_total(own: Tensor) -> Tensor:
    """Room for a sum of gradients like `own`: float32, or float64 where they are."""
    return empty(own.shape, torch.float64 if own.dtype == torch.float64 else torch.float32, own.device)


def align_of(codec: Codec) -> int:
    """Values are best cut at multiples of this: the codec's `align`, or its `block`, if it has either."""
    return int(getattr(codec, "align", getattr(codec, "block", 1)))


def decode(codec: Codec, wire: Tensor, numel: int) -> Tensor:
    """The `numel` values on `wire`, as float32."""
    check_wire(codec, wire, numel)
    return codec.decode_(torch.empty(numel, dtype=torch.float32, device=wire.device), wire.contiguous())


def check_wire(codec: Codec, wire: Tensor, numel: int) -> None:
    """Refuse bytes that cannot be the wire of `numel` values."""
    expected = codec.wire_bytes(numel)
    if not isinstance(wire, Tensor):
        raise SpecError(f"{codec.name}: a wire is a flat uint8 tensor, got {type(wire).__name__}")
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != expected:
        raise SpecError(
            f"{codec.name}: the wire of {numel} values is {expected} bytes in a flat uint8 tensor, "
            f"got {tuple(wire.shape)} of {wire.dtype}"
        )


def check_block(name: str, block: Any) -> None:
    """Refuse a block size that the kernels cannot cut."""
    if not isinstance(block, int) or not 8 <= block <= 4096 or block & (block - 1):
        raise SpecError(f"{name}: block must be a power of two from 8 to 4096, got {block!r}")


def new_wire(codec: Codec, flat: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a fresh wire for `flat`, with zeros in the last 4 bytes, where there may be padding."""
    wire = empty((codec.wire_bytes(flat.numel()),), torch.uint8, flat.device) if out is None else out
    return zero_end_(wire)


def zero_end_(wire: Tensor) -> Tensor:
    """What lay in memory must not travel as padding."""
    wire.narrow(0, max(wire.numel() - 4, 0), min(wire.numel(), 4)).zero_()
    return wire
