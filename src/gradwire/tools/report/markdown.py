"""Step 3, as text: markdown whose tables also read well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.tools.report.advice import advise
from gradwire.tools.report.columns import columns, name, notes
from gradwire.tools.report.crossover import crossovers
from gradwire.tools.report.summary import Group, Summary, by_latency
from gradwire.tools.report.words import heading, origin


def to_markdown(summary: Summary) -> str:
    """The whole report, for pasting into a pull request."""
    parts = ["## gradwire: does compression pay?", "", heading(summary), ""]
    parts += [section(group) for group in summary.groups]
    alike = [groups for _, members in summary.by_ranks() for groups in by_latency(members)]
    points = [text for groups in alike for text in crossovers(groups)]
    if points:
        parts += ["### Where the hooks begin to pay", "", *(f"- {text}" for text in points), ""]
    return "\n".join([*parts, origin(summary.origin)]) + "\n"


def section(group: Group) -> str:
    """One group: the advice, the headroom and the table."""
    advice = advise(group)
    lines = [f"### {group.name[0].upper()}{group.name[1:]}", "", f"**{advice.title}.** {advice.reason}"]
    if advice.code:
        lines += ["", f"    {advice.code}"]
    shown = columns(group)
    head = ["hook", *(column.head for column in shown)]
    rows = [[name(row), *(column.text(row, group) for column in shown)] for row in group.rows]
    return "\n".join([*lines, "", *table(head, rows), "", *notes(group), ""])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Padded, the first column to the left and the others to the right."""
    cells = [[text.replace("|", "\\|") for text in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_line(row, widths) for row in cells]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = row
    numbers = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
    return f"| {' | '.join([first.ljust(widths[0]), *numbers])} |"
