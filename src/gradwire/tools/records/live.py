"""The file of `gradwire.metrics.JSONL` while a training writes it: reading what is new, and showing it."""

import importlib.util
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from gradwire.metrics import Record
from gradwire.tools.records.jsonl import NoRecords, RecordsError, parsed
from gradwire.tools.records.table import text_table

POLL_S = 0.5
RECENT = 20
"""The number of records that a mean is from."""
SHOWN = {
    "step_s": ("step time", 1e3, "{:.1f} ms"),
    "wait_s": ("waiting for communication", 1e3, "{:.1f} ms"),
    "sent_bytes": ("sent per step", 1e-6, "{:.2f} MB"),
    "encode_s": ("encoding, all chunks", 1e3, "{:.1f} ms"),
    "wire_s": ("on the wire, all chunks", 1e3, "{:.1f} ms"),
    "decode_s": ("decoding, all chunks", 1e3, "{:.1f} ms"),
    "grad_norm": ("gradient norm", 1.0, "{:.4g}"),
    "residual_norm": ("residual norm", 1.0, "{:.4g}"),
    "error": ("error of the mean", 1.0, "{:.2g}"),
}
"""By metric: what the table calls it, a factor, and how the number is written."""


class Tail:
    """Reads the records that were added to a file since the last look. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._identity = 0, (0, 0)
        self._has_records = False

    def read(self) -> list[Record]:
        """New records. A line without its end is left for later; lines that are not records are left out.

        Raises:
            NoRecords: The path is a folder.
            RecordsError: The file cannot be read, or has complete lines and no record.
        """
        lines = self._new_lines()
        records = [record for line in lines if (record := _record(line)) is not None]
        self._has_records |= bool(records)
        if any(line.strip() for line in lines) and not self._has_records:
            raise RecordsError(f"{self.path} has no records of gradwire.metrics.JSONL: this is another kind of file")
        return records

    def _new_lines(self) -> list[bytes]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._identity != (status.st_dev, status.st_ino) or status.st_size < self._at:  # another file
                    self._at, self._identity = 0, (status.st_dev, status.st_ino)
                file.seek(self._at)
                complete = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        except IsADirectoryError:
            raise NoRecords(f"cannot read {self.path}: it is a folder; name a file of metrics in it") from None
        except OSError as error:
            raise RecordsError(f"cannot read {self.path}: {error.strerror}") from error
        self._at += len(complete) + bool(complete)
        return complete.split(b"\n") if complete else []


def _record(line: bytes) -> Record | None:
    plain = parsed(line)
    try:
        return Record.from_dict(plain) if isinstance(plain, dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def rows(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """A table of the last record beside the median of the last ones, with a header."""
    last = records[-1]
    table = [(f"step {last.step}: {last.hook}", "last", f"median of {len(records)}")]
    for name, (title, factor, text) in SHOWN.items():
        known = [value for record in records if not math.isnan(value := record.values.get(name, math.nan))]
        if known:
            now = text.format(factor * last.values[name]) if name in last.values else ""
            table.append((title, now, text.format(factor * statistics.median(known))))
    return table


def page(records: Sequence[Record]) -> str:
    """The table as text, and why `auto` has chosen the hook."""
    reason = records[-1].reason
    return text_table(rows(records), right=(1, 2)) + (f"\nauto chose {reason}" if reason else "")


def recent(path: Path) -> list[Record]:
    """The last records that there are now, at least one.

    Raises:
        NoRecords: There is no such file.
        RecordsError: It has no record.
    """
    records = Tail(path).read()[-RECENT:]
    if not records and not path.exists():
        raise NoRecords(f"there is no file {path}; `gradwire run --metrics {path} ...` makes it")
    if not records:
        raise RecordsError(f"{path} has no records yet")
    return records


def show(path: Path, out: TextIO) -> None:
    """Show the file while it grows, until this process is interrupted: a table on a terminal, else lines."""
    tail, last = Tail(path), deque[Record](maxlen=RECENT)
    draws = out.isatty() and os.environ.get("TERM") != "dumb" and importlib.util.find_spec("rich") is not None
    with _table(out) if draws else _lines(out) as update:
        while True:
            new = tail.read()
            last.extend(new)
            update(path, new, last)
            time.sleep(POLL_S)


class Update(Protocol):
    """Called again and again."""

    def __call__(self, path: Path, new: Sequence[Record], last: Sequence[Record]) -> None:
        """There are new records, or none."""


@contextmanager
def _lines(out: TextIO) -> Iterator[Update]:
    """A line for each record."""

    def update(path: Path, new: Sequence[Record], last: Sequence[Record]) -> None:
        for record in new:
            print(record, file=out, flush=True)

    yield update


@contextmanager
def _table(out: TextIO) -> Iterator[Update]:
    """A table by rich that is redrawn in place."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(file=out), auto_refresh=False) as live:

        def update(path: Path, new: Sequence[Record], last: Sequence[Record]) -> None:
            live.update(Text(_drawn(path, last)), refresh=True)

        yield update


def _drawn(path: Path, last: Sequence[Record]) -> str:
    if not last:
        return f"waiting for records in {path}"
    return f"{page(last)}\nlast record {max(time.time() - last[-1].time_s, 0.0):.0f} s ago"
