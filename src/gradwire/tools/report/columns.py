"""The table's columns: one list for the page and for markdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.tools.records.table import label, ms
from gradwire.tools.report.summary import Group, Row


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, the number under it, and how that number is written."""

    head: str
    value: Callable[[Row, Group], float | None]
    text: Callable[[Row, Group], str]


def name(row: Row) -> str:
    """What stands in the first column."""
    return label(row.hook) + ("" if row.record.averages else " †")


def notes(group: Group) -> list[str]:
    """What a reader of the table must know."""
    texts = {
        "† an upper limit: does not average, so every rank trains for itself": any(
            not row.record.averages for row in group.rows
        ),
        "~ by the ring formula; the others are counted": any(not row.record.sent_is_counted for row in group.rows),
        "! broken promise found by Hook.verify()": any(not row.record.kept_promises for row in group.rows),
        "Hooks of this table were measured at different times: what else the machine did may have been different": (
            len({row.began for row in group.rows}) > 1
        ),
        "! the ranks' parameters differ": any(row.record.averages and not row.record.identical for row in group.rows),
    }
    return [text for text, needed in texts.items() if needed]


def _spread(row: Row, group: Group) -> str:
    low, high = row.record.quartiles_s
    return f"{ms(low)}-{ms(high)}"


def _speed_up(row: Row, group: Group) -> str:
    ratio = group.speed_up(row)
    return "-" if ratio is None else f"{ratio:.2f}x"


def _wait(row: Row, group: Group) -> str:
    return "-" if row.split is None else ms(row.split.wait_s)


def _sent(row: Row, group: Group) -> str:
    return ("" if row.record.sent_is_counted else "~") + f"{row.record.sent_bytes / 1e6:.2f}"


def _kept(row: Row, group: Group) -> str:
    broken = not row.record.kept_promises or (row.record.averages and not row.record.identical)
    return f"{row.record.loss:.3f}" + (" !" if broken else "")


def columns(group: Group) -> tuple[Column, ...]:
    """Those that there is something to write in: a user's script keeps its loss to itself."""
    known = any(math.isfinite(row.record.loss) for row in group.rows)
    return COLUMNS if known else tuple(column for column in COLUMNS if column is not LOSS)


LOSS = Column("final loss", lambda row, _: row.record.loss, _kept)
COLUMNS = (
    Column("step, ms", lambda row, _: row.record.median_s, lambda row, _: ms(row.record.median_s)),
    Column("quartiles, ms", lambda row, _: row.record.quartiles_s[1] - row.record.quartiles_s[0], _spread),
    Column("speed-up", lambda row, group: group.speed_up(row), _speed_up),
    Column("wait, ms", lambda row, _: row.split.wait_s if row.split else None, _wait),
    Column("sent, MB", lambda row, _: row.record.sent_bytes, _sent),
    Column("bits a value", lambda row, group: group.bits_per_value(row), lambda row, g: f"{g.bits_per_value(row):.2f}"),
    Column(
        "gradient error", lambda row, _: row.record.gradient_error, lambda row, _: f"{row.record.gradient_error:.1e}"
    ),
    LOSS,
)
