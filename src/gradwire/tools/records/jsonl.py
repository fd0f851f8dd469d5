"""Records on disk: a line of JSON a run. Written so that a crash costs one line at most, read so that it costs no more.

Only the last line can be torn: it was being written when its process died, so it is the beginning of a record without
its newline. Anything else that is no record makes the file somebody else's, which is not touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import GradwireError, SpecError
from gradwire.tools.records.check import check
from gradwire.tools.records.records import SCHEMA, Run

START = b'{"schema": '
"""What every record begins with."""


class RecordsError(GradwireError, ValueError):
    """A file that does not hold records this version can read."""


class NoRecords(RecordsError, SpecError):
    """There is no such file: it is the path that is wrong, not what a file holds."""


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
    """All runs of a file; of two runs of a cell the later one.

    NoRecords if there is no such file, RecordsError if there is a line in it that is not ours.
    """
    return _read(path, _content(path))


def append(path: Path, runs: Iterable[Run]) -> None:
    """Add runs and see them onto the disk. What a crash left half-written at the end goes first.

    RecordsError, and the file stays as it is, if it holds anything else than records.
    """
    text = "".join(json.dumps(run.as_dict(), allow_nan=True) + "\n" for run in runs)
    with path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        held = _read(path, content)
        tail = content.rpartition(b"\n")[2]
        if held.torn:
            file.truncate(len(content) - len(tail))
        elif tail:  # a whole record that only misses its newline
            file.write(b"\n")
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise NoRecords(f"there is no file {path}; `gradwire bench --out {path}` makes it") from error
    except IsADirectoryError as error:
        raise NoRecords(f"cannot read {path}: it is a folder; name a file of records in it") from error
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}") from error


def _read(path: Path, content: bytes) -> Records:
    runs, torn = {}, []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and _is_torn(line):
            torn.append(number)
        elif line.strip():
            run = _run(line, f"{path}, line {number}")
            runs[run.cell] = run
    return Records(list(runs.values()), torn)


def _is_torn(tail: bytes) -> bool:
    """Whether what stands after the last newline is the beginning of a record, and not all of it."""
    return bool(tail) and tail[: len(START)] == START[: len(tail)] and _json(tail) is None


def _json(line: bytes) -> object | None:
    """The value, or None if it is none: no part of an object is JSON."""
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    return value


def _run(line: bytes, where: str) -> Run:
    values = _json(line)
    if not isinstance(values, dict) or "schema" not in values:
        raise RecordsError(
            f"{where} is not a record of `gradwire bench`: this is another kind of file, or it is damaged"
        )
    if values["schema"] != SCHEMA:
        raise RecordsError(
            f"{where} has schema {values['schema']!r}, and this gradwire reads schema {SCHEMA}; read the file with the "
            "gradwire that wrote it, or measure again"
        )
    try:
        return check(Run.from_dict(values))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordsError(f"{where} says schema {SCHEMA} but is not of it: {type(error).__name__} {error}") from error
