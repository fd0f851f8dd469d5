"""Curve: the losses of one run of `gradwire compare`, and the file that holds one line of JSON for each.

A run that failed has a line too, so that nothing that was measured is lost; it is run again when the file is continued.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gradwire.errors import SpecError
from gradwire.tools.records.jsonl import RecordsError, is_torn, parsed

SCHEMA = 1
KIND = "compare"
DIGITS = 7
"""Losses are kept with this many digits, as float32 has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What all runs of one comparison share."""

    script: tuple[str, ...]
    """The words of the command line."""
    source: str
    """A hash of the script's file; empty for a module."""
    nproc: int | None
    steps: int | None
    """None: to the end of the script."""
    link: str | None
    gather: str | None
    metric: str | None
    seed_arg: str | None
    torch: str

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Conditions:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**values, "script": tuple(values["script"])})

    def differences(self, other: Conditions) -> list[str]:
        """Why runs under these and other conditions cannot be compared, such as `steps (300 and 500)`."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return [f"{name} ({ours} and {theirs})" for name, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run."""

    conditions: Conditions
    name: str
    """What tables call it: the spec of the hook, or the name of a variant."""
    hook: str
    """The spec of the hook, or `plain` for none."""
    args: tuple[str, ...] = ()
    """The variant's own arguments of the script."""
    seed: int
    ranks: int
    losses: tuple[float, ...]
    """By step, the mean over the ranks."""
    first: tuple[float, ...]
    """The loss of the first step on every rank, which no hook has influenced yet."""
    metric: tuple[tuple[int, float], ...] = ()
    """The logged values of `--metric`, each with its step."""
    step_s: float
    """The median step time of the slowest rank; NaN for fewer than two steps."""
    quartiles_s: tuple[float, float]
    sent_bytes: float | None
    """Per rank and step; None without a hook."""
    failed: str = ""
    """Why the run ended early; empty if it did not."""

    @property
    def key(self) -> tuple[str, int]:
        """A file has one run for each name and seed."""
        return self.name, self.seed

    @property
    def diverged_at(self) -> int | None:
        """The step after which no loss is finite any more, if there is one."""
        finite = [at for at, loss in enumerate(self.losses, start=1) if math.isfinite(loss)]
        last = finite[-1] if finite else 0
        return last + 1 if last < len(self.losses) else None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Curve:
        """The inverse of `as_dict`. KeyError or TypeError if a value is missing or unknown."""
        tuples = {name: tuple(values[name]) for name in ("args", "losses", "first", "quartiles_s")}
        rest = {name: value for name, value in values.items() if name not in ("schema", "kind")}
        metric = tuple((int(step), float(value)) for step, value in values["metric"])
        return cls(**{**rest, **tuples, "metric": metric, "conditions": Conditions.from_dict(values["conditions"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"schema": SCHEMA, "kind": KIND, **asdict(self), "losses": [short(loss) for loss in self.losses]}


def short(value: float) -> float:
    """With as many digits as a loss has."""
    return float(f"{value:.{DIGITS}g}")


def source_of(path: Path) -> str:
    """A short hash of a file; empty if there is none."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.is_file() else ""


def is_curves(path: Path) -> bool:
    """Whether a file begins with a run of `gradwire compare`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'"kind": "{KIND}"'.encode() in file.readline(200)


def read_curves(path: Path) -> list[Curve]:
    """All runs of a file; none if there is no such file. If a name and seed has several, the last one counts.

    Raises:
        RecordsError: The file holds something else.
    """
    if not path.exists():
        return []
    curves = {}
    *lines, tail = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, *([tail] if _is_whole(tail) else [])], start=1):
        if line.strip():
            curve = _curve(line, f"{path}, line {number}")
            curves[curve.key] = curve
    return list(curves.values())


def append_curves(path: Path, curves: Iterable[Curve]) -> None:
    """Add runs to a file and flush them to the disk. An incomplete last line, of a process that died, is removed."""
    read_curves(path)  # nothing is added to a file of another kind
    with path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        tail = content.rpartition(b"\n")[2]
        if _is_whole(tail):
            file.write(b"\n")
        elif tail:
            file.truncate(len(content) - len(tail))
        file.write("".join(json.dumps(curve.as_dict()) + "\n" for curve in curves).encode())
        file.flush()
        os.fsync(file.fileno())


def check_conditions(curves: Sequence[Curve], wanted: Conditions, path: Path) -> None:
    """SpecError if a file was measured under other conditions."""
    for curve in curves:
        if differing := curve.conditions.differences(wanted):
            raise SpecError(
                f"{path} has runs under other conditions: {', '.join(differing)}; continue with the same ones, or name "
                "another file with --out"
            )


def _is_whole(tail: bytes) -> bool:
    """Whether the text after the last newline is a complete line. What is not the beginning of one is not ours."""
    return bool(tail) and not is_torn(tail)


def _curve(line: bytes, where: str) -> Curve:
    values = parsed(line)
    if not isinstance(values, dict) or values.get("kind") != KIND or values.get("schema") != SCHEMA:
        raise RecordsError(
            f"{where} is not a run of `gradwire compare`: this is another kind of file, or it is damaged"
        )
    try:
        return Curve.from_dict(values)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordsError(f"{where} does not follow its schema: {type(error).__name__} {error}") from error
