"""ShardResiduals: what error feedback keeps of the unsharded gradients of a sharded model.

Every rank encodes the rows of all other ranks, so every rank keeps a residual as large as the model: in float32, or in
8 bits (LoCo), as wires of the codec `int8`. State belongs to parameters: outside of a step it is read and written by
parameter name, in the order of the whole parameter, whatever the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.codecs.int8 import Int8
from gradwire.engine.observers import norm_of
from gradwire.errors import StateError
from gradwire.exchanges.bucket import Segment
from gradwire.exchanges.feedback import healed_
from gradwire.exchanges.sharded import Shard
from gradwire.kernels.memory import empty

Key = tuple[int, int]
"""(start, numel) of a piece of a parameter's row."""


class ShardResiduals:
    """The residual of each parameter, by name, as the rows of all ranks."""

    def __init__(self, size: int, shards: Iterable[Shard], device: torch.device) -> None:
        self._size, self._device, self._codec = size, device, Int8()
        self._shards = {shard.name: shard for shard in shards}
        self._rows: dict[str, Tensor] = {}
        """(size, n) in float32."""
        self._wires: dict[str, dict[Key, Tensor]] = {}
        """(size, bytes) for each piece. Where there is a wire, it is newer than `_rows`."""

    def __contains__(self, name: str) -> bool:
        return name in self._rows or name in self._wires

    @property
    def nbytes(self) -> int:
        """The memory that is used."""
        wires = [wire for pieces in self._wires.values() for wire in pieces.values()]
        return sum(tensor.nbytes for tensor in (*self._rows.values(), *wires))

    # -- within a step -----------------------------------------------------------------------------------------

    def prepare(self, chunks: Sequence[Sequence[Segment]], packed: bool) -> None:
        """Get ready for the chunks of a message, before any of them is taken. Afterwards threads may take and put."""
        pieces: dict[str, set[Key]] = {}
        for segment in (segment for chunk in chunks for segment in chunk):
            pieces.setdefault(segment.name, set()).add((segment.start, segment.numel))
        for name, keys in pieces.items():
            known = self._wires.get(name, {}).keys()
            if packed and keys == known:
                self._rows.pop(name, None)  # every piece has a wire by now
                continue
            if known or not packed:
                self._rows[name] = self._unpacked(name) if known or name not in self._rows else self._rows[name]
            self._wires.pop(name, None)
            if packed:
                self._wires[name] = {}

    def take(self, segments: Sequence[Segment]) -> Tensor:
        """A copy of the rows of some pieces, (size, n) in float32."""
        values = empty((self._size, sum(segment.numel for segment in segments)), torch.float32, self._device)
        for segment, part in zip(segments, values.split([segment.numel for segment in segments], 1), strict=True):
            self._copy_piece(segment.name, (segment.start, segment.numel), part)
        return values

    def put(self, segments: Sequence[Segment], values: Tensor, finite: Tensor | None = None) -> None:
        """Keep new values for some pieces, or if `finite` is false, the old ones."""
        if finite is not None and values.device.type != "cpu":  # where the host must not wait for the answer
            values = torch.where(finite, values, self.take(segments))
        elif finite is not None and not finite:
            values = self.take(segments)
        for segment, new in zip(segments, values.split([segment.numel for segment in segments], 1), strict=True):
            if segment.name in self._wires:
                wires = [self._codec.encode(row.contiguous()).clone() for row in new]
                self._wires[segment.name][segment.start, segment.numel] = torch.stack(wires)
            else:
                self._rows[segment.name].narrow(1, segment.start, segment.numel).copy_(new)

    def drop(self, names: Iterable[str]) -> None:
        """Forget what is kept for some parameters."""
        for name in names:
            self._rows.pop(name, None)
            self._wires.pop(name, None)

    # -- between steps -----------------------------------------------------------------------------------------

    def copies(self) -> dict[str, Tensor]:
        """The residual of every parameter that has one, flat, in the order of the whole parameter."""
        return {name: shard.from_rows(self._unpacked(name)) for name, shard in self._shards.items() if name in self}

    def norm(self) -> Tensor | None:
        """Of all residuals together; None if there is none."""
        names = {**self._rows, **self._wires}
        kept = [self._unpacked(name) if name in self._wires else self._rows[name] for name in names]
        return norm_of(kept) if kept else None

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace everything that is kept."""
        self._wires.clear()
        self._rows = {
            name: self._shards[name].to_rows(value.detach().float(), self._size) for name, value in residuals.items()
        }

    def scale_(self, factor: float) -> None:
        """Multiply all residuals, when the unit of the gradients changes."""
        if not (isinstance(factor, int | float) and math.isfinite(factor) and factor > 0):
            raise StateError(f"scale_state: factor must be a finite number above 0, got {factor!r}")
        self.load({name: healed_(value * factor) for name, value in self.copies().items()})

    def _unpacked(self, name: str) -> Tensor:
        numel = self._shards[name].padded.numel()
        kept = self._rows.get(name)
        rows = torch.zeros(self._size, numel, device=self._device) if kept is None else kept.clone()
        for (start, numel), wires in self._wires.get(name, {}).items():
            for row, wire in zip(rows, wires, strict=True):
                self._codec.decode_(row.narrow(0, start, numel), wire)
        return rows

    def _copy_piece(self, name: str, key: Key, out: Tensor) -> None:
        wires = self._wires.get(name, {}).get(key)
        if wires is not None:
            for row, wire in zip(out, wires, strict=True):
                self._codec.decode_(row, wire)
        elif name in self._rows:
            out.copy_(self._rows[name].narrow(1, *key))
        else:
            out.zero_()
