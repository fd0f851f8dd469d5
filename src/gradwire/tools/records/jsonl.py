"""Records on disk: one line of JSON per run. A crash while a line is written costs that line and nothing else.

Only the last line can be incomplete: its process died while it wrote the line, so the line is the beginning of a record
without a newline. A file with any other line that is not a record is not ours: it is refused and left unchanged.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError, SpecError
from gradwire.tools.records.records import SCHEMA, Run

START = b'{"schema": '
"""Every record begins with these bytes."""
TYPES: Mapping[str, tuple[type, ...]] = {
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
}
"""Annotation of a field -> the types that JSON may have for it."""


class RecordsError(GradwireError, ValueError):
    """A file that does not hold records which this version can read."""


class NoRecords(RecordsError, SpecError):
    """The path is wrong: there is no such file."""


@dataclass(frozen=True, slots=True)
class Records:
    """The content of a file."""

    runs: list[Run]
    torn: list[int]
    """Numbers of the incomplete lines."""

    def torn_text(self, path: Path) -> str:
        """A message about the incomplete lines; empty if there are none."""
        if not self.torn:
            return ""
        lines = f"line{'s' if len(self.torn) > 1 else ''} {', '.join(map(str, self.torn))}"
        return f"{path}: {lines} half-written: dropped"


def read(path: str | os.PathLike[str]) -> Records:
    """All runs of a file. If a cell has two runs, the later one counts.

    Args:
        path: A file of `gradwire bench`.

    Returns:
        The runs, and what was dropped of a line that a process had no time to finish.

    Raises:
        NoRecords: There is no such file.
        RecordsError: The file holds a line that is not a record.

    Examples:
        >>> runs = gradwire.report.read("records.jsonl").runs
    """
    return _parse(Path(path), _content(Path(path)))


def append(path: Path, runs: Iterable[Run]) -> None:
    """Add runs to a file and flush them to the disk. An incomplete last line is removed first.

    Raises:
        RecordsError: The file holds something other than records. It stays unchanged.
    """
    text = "".join(json.dumps(run.as_dict(), allow_nan=True) + "\n" for run in runs)
    with path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        held = _parse(path, content)
        tail = content.rpartition(b"\n")[2]
        if held.torn:
            file.truncate(len(content) - len(tail))
        elif tail:  # a complete record that only lacks its newline
            file.write(b"\n")
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def json_text(content: Any, indent: int | None = 2) -> str:
    """JSON for other programs: NaN and infinity, which standard JSON cannot express, become null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, list | tuple) else content


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise NoRecords(f"there is no file {path}; `gradwire bench --out {path}` makes it") from error
    except IsADirectoryError as error:
        raise NoRecords(f"cannot read {path}: it is a folder; name a file of records in it") from error
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}") from error


def _parse(path: Path, content: bytes) -> Records:
    runs, torn = {}, []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and is_torn(line):
            torn.append(number)
        elif line.strip():
            run = _run(line, f"{path}, line {number}")
            runs[run.cell] = run
    return Records(list(runs.values()), torn)


def is_torn(tail: bytes) -> bool:
    """Whether the text after the last newline is the beginning of a record but not a complete one."""
    return bool(tail) and tail[: len(START)] == START[: len(tail)] and parsed(tail) is None


def parsed(line: bytes) -> object | None:
    """The value, or None if the line is not JSON. The beginning of an object never is."""
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    return value


def _run(line: bytes, where: str) -> Run:
    values = parsed(line)
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
        return _checked(Run.from_dict(values))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordsError(
            f"{where} says schema {SCHEMA} but does not follow it: {type(error).__name__} {error}"
        ) from error


def _checked(run: Run) -> Run:
    """The run; TypeError or ValueError if a report could not work with its values."""
    for part in (run, run.cell, run.origin, run.record, *filter(None, [run.split])):
        _check_types(part)
    _check_ranges(run)
    return run


def _check_types(part: Any) -> None:
    """Check fields of a simple type, and tuples of them."""
    for each in fields(part):
        value, kind = getattr(part, each.name), str(each.type)
        wanted = TYPES.get(kind.removeprefix("tuple[").removesuffix(", ...]"), ())
        for item in value if kind.startswith("tuple") else (value,):
            if wanted and not (isinstance(item, wanted) and isinstance(item, bool) == (wanted == (bool,))):
                raise TypeError(f"{each.name} must be of type {kind}, got {item!r}")


def _check_ranges(run: Run) -> None:
    """Check the numbers that a report divides by or takes the logarithm of. A run that diverged may have any loss."""
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
