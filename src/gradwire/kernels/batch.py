"""Batch: many tensors of a message in one call, for kernels whose cost is the launch (see `Codec.batch`)."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Entry(NamedTuple):
    """The values of one tensor in a bucket, and where their wire is."""

    start: int
    numel: int
    at: int
    """The first byte of the wire, counted from where the method says."""
    exempt: bool
    """These values travel in float32."""


class Batch(Protocol):
    """A codec on all entries at once, with the bits of `Codec`. A method that returns False has done nothing."""

    def encode_(self, wires: Tensor, flat: Tensor, entries: tuple[Entry, ...], residual: Tensor | None) -> bool:
        """Write the wires of all entries, which lie in `wires`; `residual` gets what the encoding lost."""

    def reduce_(
        self,
        means: Tensor,
        flat: Tensor,
        entries: tuple[Entry, ...],
        wires: Tensor,
        own: int,
        alpha: float,
        residual: Tensor | None,
    ) -> bool:
        """Encode `alpha * (flat + values of all rows of `wires` but `own`)` into the row `own` of `means`.

        Entries lie in a row. `residual` gets what the encoding lost, divided by alpha.
        """

    def total_(self, flat: Tensor, entries: tuple[Entry, ...], wires: Tensor, alpha: float, rows: int) -> bool:
        """`flat = alpha * values`, added up in float32 over `rows` rows, or over one row if entries lie in all."""
