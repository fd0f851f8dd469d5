"""Records on disk: a line of JSON a run. Written so that a crash costs one line at most, read so that it costs no more.

A line is whole when it ends in a newline and is JSON; one that is not was being written when its process died.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.records import SCHEMA, Run
from gradwire.errors import GradwireError, SpecError


class RecordsError(GradwireError, ValueError):
    """A file that does not hold records this version can read."""


@dataclass(frozen=True, slots=True)
class Records:
    """What a file holds."""

    runs: list[Run]
    torn: list[int]
    """Numbers of the lines that were only half written."""

    def torn_text(self, path: Path) -> str:
        """What to say about them; empty if there are none."""
        if not self.torn:
            return ""
        lines = f"line{'s' if len(self.torn) > 1 else ''} {', '.join(map(str, self.torn))}"
        return f"{path}: {lines} half-written: dropped"


def read(path: Path) -> Records:
    """All runs of a file; of two runs of a cell the later one. RecordsError if a line is whole but not ours."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}; `gradwire bench --out {path}` makes it") from error
    runs, torn = {}, []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        values = _json(line)
        if values is None:
            torn.append(number)
        else:
            run = _run(values, f"{path}, line {number}")
            runs[run.cell] = run
    return Records(list(runs.values()), torn)


def append(path: Path, runs: Iterable[Run]) -> None:
    """Add runs and see them onto the disk. What a crash left half-written at the end goes first."""
    text = "".join(json.dumps(run.as_dict(), allow_nan=True) + "\n" for run in runs)
    with path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        tail = content.rpartition(b"\n")[2]
        if tail and _json(tail.decode(errors="replace")) is None:
            file.truncate(len(content) - len(tail))
        elif tail:  # a whole record that only misses its newline
            file.write(b"\n")
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _json(line: str) -> object | None:
    """The value, or None if the line is only a part of one: no part of an object is JSON."""
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    return value


def _run(values: object, where: str) -> Run:
    if not isinstance(values, dict) or "schema" not in values:
        raise RecordsError(f"{where} is not a record of `gradwire bench`")
    if values["schema"] != SCHEMA:
        raise RecordsError(
            f"{where} has schema {values['schema']!r}, and this gradwire reads schema {SCHEMA}; read the file with the "
            "gradwire that wrote it, or measure again"
        )
    try:
        return Run.from_dict(values)
    except (KeyError, TypeError, SpecError) as error:
        raise RecordsError(f"{where} says schema {SCHEMA} but is not of it: {type(error).__name__} {error}") from error
