"""Does a run that was read from a file hold what a report can work with?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gradwire.tools.records.records import Run

TYPES: Mapping[str, tuple[type, ...]] = {
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
}


def check(run: Run) -> Run:
    """TypeError or ValueError if not."""
    for part in (run, run.cell, run.origin, run.record, *filter(None, [run.split])):
        _check_types(part)
    _check_ranges(run)
    return run


def _check_types(part: Any) -> None:
    """Fields of a simple type, and rows of numbers."""
    for each in fields(part):
        value, kind = getattr(part, each.name), str(each.type)
        wanted = TYPES.get(kind.removeprefix("tuple[").removesuffix(", ...]"), ())
        for item in value if kind.startswith("tuple") else (value,):
            if wanted and not (isinstance(item, wanted) and isinstance(item, bool) == (wanted == (bool,))):
                raise TypeError(f"{each.name} must be of type {kind}, got {item!r}")


def _check_ranges(run: Run) -> None:
    """Numbers that a report divides by, or takes the logarithm of. The loss of a run that diverged may be anything."""
    record, rate = run.record, run.link_bits_per_s
    timed = bool(record.step_s) and all(0 < value < math.inf for value in record.step_s)
    _require(timed, "step_s must hold times above 0")
    _require(record.params > 0, f"params must be above 0, got {record.params}")
    _require(0 <= record.sent_bytes < math.inf, f"sent_bytes must be 0 or more, got {record.sent_bytes}")
    _require(not record.gradient_error < 0, f"gradient_error must be 0 or more, got {record.gradient_error}")
    _require(run.cell.ranks >= 2, f"ranks must be at least 2, got {run.cell.ranks}")
    _require(rate is None or 0 < rate < math.inf, f"link_bits_per_s must be above 0 or null, got {rate}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
