"""Codec: values <-> bytes. Everything that exchanges may use of a codec is declared here.

To write a codec, subclass `Codec` as a frozen dataclass whose fields are the options of its spec, and implement
`bound`, `wire_bytes`, `encode` and `decode_`. All other members have a default that is right for a simple codec.

    @dataclass(frozen=True, slots=True)
    class Double(Codec):
        '''Values as they are, in float32.'''

        name: ClassVar[str] = "double"

        @property
        def bound(self) -> float:
            return 2.0**-23

        def wire_bytes(self, numel: int) -> int:
            return 4 * numel

        def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
            wire = self.new_wire(flat, out)
            wire.view(torch.float32).copy_(flat)
            return wire

        def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
            values = wire.view(torch.float32).to(out.dtype) * alpha
            return out.add_(values) if add else out.copy_(values)

Register it as an entry point of the group `gradwire.codecs`, and `gradwire.register(model, "double")` finds it.
"""

import zlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradwire.errors import SpecError
from gradwire.kernels import batched, pick
from gradwire.kernels.batch import Batch
from gradwire.kernels.memory import empty
from gradwire.spec import changed, write


class Codec(ABC):
    """Turns a flat tensor into one uint8 wire whose size is known from the number of values alone.

    A codec is pure: it keeps no state, touches no global random state, never communicates and never synchronises with
    an accelerator (no `.item()`, no `nonzero`, no shape that depends on the values).

    Subclass it as a frozen dataclass whose fields are the options of the spec, and implement `bound`, `wire_bytes`,
    `encode` and `decode_`. All other members have defaults.

    Examples:
        >>> codec = gradwire.codecs.Int8(block=128)
        >>> wire = codec.encode(torch.randn(1000))
        >>> values = codec.decode(wire, 1000)
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    """The name in a spec."""
    wire_dtype: ClassVar[torch.dtype | None] = None
    """A number type that the backend can sum and that holds a value by itself; None if the wire is more than that."""
    exempts_small: ClassVar[bool] = False
    """Whether vectors and small tensors should travel in float32 instead (the default of the option `exempt`)."""
    needs_feedback: ClassVar[bool] = False
    """Whether the codec loses so much that error feedback should be on by default."""
    allocatable_bits: ClassVar[int] = 0
    """The width of a code, if `allocate=true` can vary it from block to block; 0 if it cannot."""

    # -- what a codec must have --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def bound(self) -> float:
        """The worst-case error: `|decode(encode(x)) - x| <= bound * |x|` (2-norms), for normal finite values."""

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """The length of the wire for `numel` values; a multiple of 4, so that wires can be laid side by side."""

    @abstractmethod
    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """The wire of `flat`, written to `out` if given. Inf and NaN must come back as inf or NaN."""

    @abstractmethod
    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """`out = alpha * values`, or `out += alpha * values`: the mean, the residual and the sum in one primitive."""

    # -- what a codec may declare ------------------------------------------------------------------------------

    @property
    def align(self) -> int:
        """Values are best cut at multiples of this: the block size, if the codec works in blocks."""
        return 1

    @property
    def is_random(self) -> bool:
        """Whether `encode` rounds stochastically. It must then be deterministic given the seed of `seeded`."""
        return False

    def seeded(self, *salt: object) -> Self:
        """This codec with a seed derived from its own seed and `salt` (rank, step, position), if it `is_random`."""
        return self

    def sum_(self, out: Tensor, wires: Tensor, alpha: float) -> Tensor:
        """`out = alpha * (values of all wires)`, added in their order. An override may save passes, not change bits."""
        for rank, wire in enumerate(wires):
            self.decode_(out, wire, alpha=alpha, add=rank > 0)
        return out

    def reduce_(self, wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
        """Encode `alpha * (own + values of all wires but skip)` into `wire`. An override may save passes."""
        return self.encode(self.reduced(own, wires, skip, alpha), out=wire)

    def batch(self, flat: Tensor) -> Batch | None:
        """Kernels that code all tensors of a message like `flat` at once, with the same bits; None: one at a time."""
        return None

    # -- what a codec can use ----------------------------------------------------------------------------------

    def reduced(self, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
        """The sum that `reduce_` encodes."""
        total = new_total(own).copy_(own).mul_(alpha)  # own * alpha would be rounded to the type of own
        for rank, other in enumerate(wires):
            if rank != skip:
                self.decode_(total, other, alpha=alpha, add=True)
        return total

    def new_wire(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """`out`, or a new wire for `flat`, with zeros in the last 4 bytes, where there may be padding."""
        wire = empty((self.wire_bytes(flat.numel()),), torch.uint8, flat.device) if out is None else out
        return zero_end_(wire)

    def decode(self, wire: Tensor, numel: int) -> Tensor:
        """The `numel` values on `wire`, as float32. Raises SpecError if these bytes cannot be such a wire."""
        self.check_wire(wire, numel)
        return self.decode_(torch.empty(numel, dtype=torch.float32, device=wire.device), wire.contiguous())

    def check_wire(self, wire: Tensor, numel: int) -> None:
        """Raise SpecError for bytes that cannot be the wire of `numel` values."""
        expected = self.wire_bytes(numel)
        if not isinstance(wire, Tensor):
            raise SpecError(f"{self.name}: a wire is a flat uint8 tensor, got {type(wire).__name__}")
        if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != expected:
            raise SpecError(
                f"{self.name}: the wire of {numel} values is {expected} bytes in a flat uint8 tensor, "
                f"got {tuple(wire.shape)} of {wire.dtype}"
            )

    def __str__(self) -> str:
        """The spec: the name, and the options that differ from their defaults."""
        return write(self.name, changed(self))


class BlockCodec(Codec):
    """A codec that codes block after block, with kernels of its own name.

    A subclass is a dataclass with the field `block`, and names further arguments of its kernels in `options`.
    """

    __slots__ = ()
    block: int

    def __post_init__(self) -> None:
        check_block(self.name, self.block)

    @property
    def align(self) -> int:
        """Whole blocks."""
        return self.block

    @property
    def options(self) -> tuple[Any, ...]:
        """What the kernels must know besides the block size."""
        return ()

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """The wire of `flat`."""
        wire = self.new_wire(flat, out)
        if flat.numel():
            pick(self.name, flat).encode_(wire, flat, self.block, *self.options)
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        """Undo `encode`."""
        if out.numel():
            pick(self.name, out).decode_(out, wire, self.block, *self.options, alpha, add)
        return out

    def batch(self, flat: Tensor) -> Batch | None:
        """All tensors of a message in one pass, where there are kernels for it."""
        return batched(self.name, flat, self.block, *self.options)


def new_total(own: Tensor) -> Tensor:
    """Work space for a sum of gradients like `own`: float64 for float64 gradients, else float32."""
    return empty(own.shape, torch.float64 if own.dtype == torch.float64 else torch.float32, own.device)


def mixed(seed: int, *salt: object) -> int:
    """A 32-bit seed that depends on all of the arguments."""
    return zlib.crc32(repr((seed, *salt)).encode())


def check_block(name: str, block: Any) -> None:
    """Raise SpecError for a block size that the kernels cannot cut."""
    if not isinstance(block, int) or not 8 <= block <= 4096 or block & (block - 1):
        raise SpecError(f"{name}: block must be a power of two from 8 to 4096, got {block!r}")


def zero_end_(wire: Tensor) -> Tensor:
    """Zero the last 4 bytes: what lay in memory must not travel as padding."""
    wire.narrow(0, max(wire.numel() - 4, 0), min(wire.numel(), 4)).zero_()
    return wire
