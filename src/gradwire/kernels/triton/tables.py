"""Tables: which program of a kernel works on which values, for all tensors of a message at once."""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.batch import Entry


class Table(NamedTuple):
    """(programs, 4): first value, number of values, byte of the wire, tile (~tile where exempt), of each program."""

    rows: Tensor
    align: int
    """What divides all first values: 1 or 8."""
    wire_align: int
    """What divides all positions on the wire: 4 or 16."""


def table_of(entries: tuple[Entry, ...], values: int, device: torch.device) -> Table:
    """The table for programs of `values` values each. It stays on the device, for use on the current stream."""
    stream = 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
    return _kept(entries, values, device, stream)


@lru_cache(maxsize=4096)
def _kept(entries: tuple[Entry, ...], values: int, device: torch.device, stream: int) -> Table:
    rows = torch.tensor([row for entry in entries for row in _rows(entry, values)], dtype=torch.int64)
    align = 8 if divides(8, (entry.start for entry in entries)) else 1
    wire_align = 16 if divides(16, (entry.at for entry in entries)) else 4
    return Table(rows.view(-1, 4).to(device, non_blocking=True), align, wire_align)


def _rows(entry: Entry, values: int) -> list[tuple[int, int, int, int]]:
    tiles = range(-(-entry.numel // values))
    return [(entry.start, entry.numel, entry.at, ~tile if entry.exempt else tile) for tile in tiles]


def divides(number: int, others: Iterable[int]) -> bool:
    """Whether all of the others are multiples of `number`."""
    return math.gcd(number, *others) == number
