"""What calls the Triton kernels: for one tensor, and for all tensors of a message (`TritonBatch`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.kernels.batch import Entry
from gradwire.kernels.triton import passes
from gradwire.kernels.triton.coding import FP16, Coding
from gradwire.kernels.triton.launch import failed, give_up, launch
from gradwire.kernels.triton.tables import Table, divides, table_of


def encode_one(wire: Tensor, values: Tensor, coding: Coding, seed: int = 0) -> None:
    """Write the wire of one tensor."""
    reduce_one(wire, values, wire.view(1, -1), 0, coding, 1.0, seed)


def reduce_one(
    wire: Tensor, own: Tensor, wires: Tensor, skip: int, coding: Coding, alpha: float, seed: int = 0
) -> None:
    """Encode `alpha * (own + values of all wires but one)`."""
    numbers = own.numel(), wires.stride(0), len(wires) - 1, skip, 0, alpha, 1.0, signed(seed)
    launch(
        passes.reduce,
        -(-own.numel() // coding.values),
        (own, wires, wire, own, wire, wire),
        *numbers,
        **_single(coding),
        KEEP=False,
    )


def total_one(out: Tensor, wires: Tensor, coding: Coding, alpha: float, add: bool = False) -> None:
    """`out = alpha * (values of all wires)`, or `+=`, added up in float32."""
    launch(
        passes.total,
        -(-out.numel() // coding.values),
        (out, wires, wires),
        *(out.numel(), wires.stride(0), len(wires), 0, alpha),
        **_single(coding),
        ADD=add,
    )


def signed(seed: int) -> int:
    """The 32 bits of a seed as a signed number, so that its type does not depend on its value."""
    return ((seed & 0xFFFF_FFFF) ^ 0x8000_0000) - 0x8000_0000


def _single(coding: Coding) -> dict[str, Any]:
    return {"C": coding, "TABLE": False, "ALIGN": 8, "WIRE_ALIGN": 4, "warps": coding.warps}


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """See `gradwire.kernels.batch.Batch`. A launch per call; fp16, whose scale must be known first, takes two."""

    coding: Coding
    seed: int = 0

    def encode_(self, wires: Tensor, flat: Tensor, entries: tuple[Entry, ...], residual: Tensor | None) -> bool:
        """One pass over the values."""
        return _attempt(lambda: self._encode(wires, 0, flat, entries, residual, 1.0))

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
        """One pass over the values and the wires. For fp16, the sum is kept until its largest magnitude is known."""
        if self.coding.kind != FP16.value:
            return _attempt(lambda: self._reduce(means, flat, entries, wires, own, alpha, residual))

        def work() -> None:
            sums = torch.empty_like(flat, dtype=torch.float32)
            largest = self._tops(flat, entries, wires, own, alpha, sums)
            self._encode(means, own * means.stride(0), sums, entries, residual, 1.0 / alpha, largest)

        return _attempt(work)

    def total_(self, flat: Tensor, entries: tuple[Entry, ...], wires: Tensor, alpha: float, rows: int) -> bool:
        """One pass over the wires."""

        def work() -> None:
            table = self._table(entries, flat)
            numbers = 0, wires.stride(0), rows, 0, alpha
            launch(
                passes.total,
                len(table.rows),
                (flat, wires, table.rows),
                *numbers,
                **self._constants(table, wires.stride(0)),
                ADD=False,
            )

        return _attempt(work)

    def _encode(
        self,
        wires: Tensor,
        at: int,
        flat: Tensor,
        entries: tuple[Entry, ...],
        residual: Tensor | None,
        size: float,
        largest: Tensor | None = None,
    ) -> None:
        if self.coding.kind == FP16.value and largest is None:
            largest = self._tops(flat, entries, wires.view(1, -1), 0, 1.0, None)
        table = self._table(entries, flat)
        tensors = flat, wires, wires, flat if residual is None else residual, wires if largest is None else largest
        launch(
            passes.reduce,
            len(table.rows),
            (*tensors, table.rows),
            *(0, 0, 0, 0, at, 1.0, size, signed(self.seed)),
            **self._constants(table, at),
            KEEP=residual is not None,
        )

    def _reduce(
        self,
        means: Tensor,
        flat: Tensor,
        entries: tuple[Entry, ...],
        wires: Tensor,
        own: int,
        alpha: float,
        residual: Tensor | None,
    ) -> None:
        table, at = self._table(entries, flat), own * means.stride(0)
        launch(
            passes.reduce,
            len(table.rows),
            (flat, wires, means, flat if residual is None else residual, means, table.rows),
            *(0, wires.stride(0), len(wires) - 1, own, at, alpha, 1.0 / alpha, signed(self.seed)),
            **self._constants(table, wires.stride(0), at),
            KEEP=residual is not None,
        )

    def _tops(
        self, flat: Tensor, entries: tuple[Entry, ...], wires: Tensor, own: int, alpha: float, sums: Tensor | None
    ) -> Tensor:
        table = self._table(entries, flat)
        largest = torch.empty(len(table.rows), dtype=torch.int32, device=flat.device)
        launch(
            passes.tops,
            len(table.rows),
            (flat, wires, flat if sums is None else sums, largest, table.rows),
            *(0, wires.stride(0), len(wires) - 1, own, alpha),
            **self._constants(table, wires.stride(0)),
            KEEP=sums is not None,
        )
        return largest

    def _table(self, entries: tuple[Entry, ...], flat: Tensor) -> Table:
        return table_of(entries, self.coding.values, flat.device)

    def _constants(self, table: Table, *offsets: int) -> dict[str, Any]:
        align = table.wire_align if divides(16, offsets) else 4
        return {**_single(self.coding), "TABLE": True, "ALIGN": table.align, "WIRE_ALIGN": align}


def _attempt(work: Callable[[], None]) -> bool:
    """Whether it worked. If not, nothing was written that the torch kernels would not write as well."""
    if failed:
        return False
    try:
        work()
    except Exception as error:
        give_up(error)
        return False
    return True
