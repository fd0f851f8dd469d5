"""Records -> text. Pure functions: no terminal is asked anything here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gradwire.tools.records.records import PLAIN, Record

GBIT = 1e9
Rows = Sequence[Sequence[str]]


def text_table(rows: Rows, *, right: Collection[int] = ()) -> str:
    """Rows of cells as lines of text, the header first: columns are padded and separated by two blanks.

    `right` holds the indices of the columns that are aligned to the right. Lines have no blanks at their end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        padded = [cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in cells]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Column:
    """A heading of three lines, the same in words, and what stands under it."""

    head: tuple[str, str, str]
    words: str
    cell: Callable[[Record, Record], str]
    """From a record and the baseline."""


def table(records: Sequence[Record], width: int | None = None) -> str:
    """A row a hook, with footnotes; if `width` is too little for rows, a paragraph a hook.

    The baseline of the speed-up is PLAIN, or the first record where that is missing.
    """
    baseline = next((record for record in records if record.hook == PLAIN), records[0])
    cells = [[column.cell(record, baseline) for column in COLUMNS] for record in records]
    layouts = (_rows(cells, gap=2), _rows(cells, gap=1), _paragraphs(cells))
    fitting = (lines for lines in layouts if width is None or max(map(len, lines)) <= width)
    return "\n".join([*next(fitting, layouts[-1]), *_footnotes(records)])


def label(hook: str) -> str:
    """What to call a hook."""
    return "plain DDP" if hook == PLAIN else hook


def ms(seconds: float) -> str:
    """Milliseconds with one decimal."""
    return f"{1e3 * seconds:.1f}"


def _name(record: Record, baseline: Record) -> str:
    return label(record.hook) + ("" if record.averages else " *")


def _step(record: Record, baseline: Record) -> str:
    return ms(record.median_s)


def _spread(record: Record, baseline: Record) -> str:
    low, high = record.quartiles_s
    return f"{1e3 * low:.0f}-{1e3 * high:.0f}"


def _speed_up(record: Record, baseline: Record) -> str:
    return f"{baseline.median_s / record.median_s:.2f}x"


def _sent(record: Record, baseline: Record) -> str:
    return ("" if record.sent_is_counted else "~") + f"{record.sent_bytes / 1e6:.2f}"


def _wire(record: Record, baseline: Record) -> str:
    return ms(record.wire_s(GBIT))


def _error(record: Record, baseline: Record) -> str:
    return f"{record.gradient_error:.1e}"


def _loss(record: Record, baseline: Record) -> str:
    return f"{record.loss:.3f}"


COLUMNS = (
    Column(("", "", "hook"), "hook", _name),
    Column(("step", "median", "ms"), "step time, median, ms", _step),
    Column(("step", "quartiles", "ms"), "step time, quartiles, ms", _spread),
    Column(("", "speed-up", "vs plain"), "speed-up against plain DDP", _speed_up),
    Column(("sent", "per step", "MB"), "sent per step and rank, MB", _sent),
    Column(("wire at", "1 Gbit/s", "ms, calc."), "wire at 1 Gbit/s, ms (calculated)", _wire),
    Column(("", "gradient", "error"), "gradient error", _error),
    Column(("", "final", "loss"), "final loss", _loss),
)


def _rows(cells: Rows, gap: int) -> list[str]:
    heads = [[column.head[line] for column in COLUMNS] for line in range(3)]
    widths = [max(map(len, column)) for column in zip(*heads, *cells, strict=True)]
    rule = ["-" * width for width in widths]
    return [_line(row, widths, " " * gap) for row in (*heads, rule, *cells)]


def _line(row: Sequence[str], widths: Sequence[int], gap: str) -> str:
    """The name to the left, numbers to the right."""
    numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return gap.join([row[0].ljust(widths[0]), *numbers]).rstrip()


def _paragraphs(cells: Rows) -> list[str]:
    width = max(len(column.words) for column in COLUMNS)
    lines = []
    for name, *values in cells:
        lines.append(name)
        lines += [f"  {column.words:<{width}} {value:>9}" for column, value in zip(COLUMNS[1:], values, strict=True)]
    return lines


def _footnotes(records: Sequence[Record]) -> list[str]:
    notes = {
        "* upper limit, does not train together": any(not record.averages for record in records),
        "~ by the ring formula; the others are counted": any(not record.sent_is_counted for record in records),
    }
    return [note for note, needed in notes.items() if needed]
