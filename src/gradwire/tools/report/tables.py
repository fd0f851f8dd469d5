"""The numbers of a report as text: the columns that page, markdown and terminal share, notes, and markdown."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.tools.records.records import Origin
from gradwire.tools.records.table import label, markdown_table, ms
from gradwire.tools.report.advice import advise
from gradwire.tools.report.summary import Group, Row, Summary, by_latency, crossover_texts


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, the number under it, and its text."""

    head: str
    value: Callable[[Row, Group], float | None]
    text: Callable[[Row, Group], str]


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


def _loss(row: Row, group: Group) -> str:
    failed = not row.record.kept_promises or (row.record.averages and not row.record.identical)
    return f"{row.record.loss:.3f}" + (" !" if failed else "")


LOSS = Column("final loss", lambda row, _: row.record.loss, _loss)
COLUMNS = (
    Column("step, ms", lambda row, _: row.record.median_s, lambda row, _: ms(row.record.median_s)),
    Column("quartiles, ms", lambda row, _: row.record.quartiles_s[1] - row.record.quartiles_s[0], _spread),
    Column("speed-up", lambda row, group: group.speed_up(row), _speed_up),
    Column("wait, ms", lambda row, _: row.split.wait_s if row.split else None, _wait),
    Column("sent, MB", lambda row, _: row.record.sent_bytes, _sent),
    Column("bits per value", lambda row, group: group.bits_per_value(row), lambda r, g: f"{g.bits_per_value(r):.2f}"),
    Column("gradient error", lambda row, _: row.record.gradient_error, lambda r, _: f"{r.record.gradient_error:.1e}"),
    LOSS,
)


def columns(group: Group) -> tuple[Column, ...]:
    """The columns of a group: without the loss if it is not known, as for a user's script."""
    known = any(math.isfinite(row.record.loss) for row in group.rows)
    return COLUMNS if known else tuple(column for column in COLUMNS if column is not LOSS)


def name(row: Row) -> str:
    """The first cell of a row."""
    return label(row.hook) + ("" if row.record.averages else " †")


def notes(group: Group) -> list[str]:
    """The notes that belong under the table of a group."""
    records = [row.record for row in group.rows]
    texts = {
        "† an upper limit: this hook does not average, so every rank trains on its own": any(
            not record.averages for record in records
        ),
        "~ computed for a ring all-reduce; the other values are counted": any(
            not record.sent_is_counted for record in records
        ),
        "! Hook.verify() failed": any(not record.kept_promises for record in records),
        "The hooks of this table were measured at different times, so the load of the machine may have differed": (
            len({row.began for row in group.rows}) > 1
        ),
        "! the parameters of the ranks differ": any(record.averages and not record.identical for record in records),
    }
    return [text for text, needed in texts.items() if needed]


def heading(summary: Summary) -> str:
    """What was trained, how, and what the numbers mean."""
    repeats = max(row.repeats for group in summary.groups for row in group.rows)
    settings = summary.settings
    turn_steps = min(settings.round_steps, settings.steps)
    runs = "1 run" if repeats == 1 else f"{repeats} runs"
    seeds = f"seed {settings.seed}" + (" and the following" if repeats > 1 else "")
    return (
        f"A GPT of {summary.params / 1e6:.1f}M parameters was trained for {settings.steps} steps under each hook, with "
        f"{runs} on each link and number of ranks ({seeds}). The hooks took turns of {turn_steps} steps. Link rates "
        "are emulated. Step times are medians with quartiles over the steps of the slowest rank. Speed-ups are "
        "relative to the hook exact, which sends what plain DDP sends."
    )


def origin_text(origin: Origin) -> str:
    """Machine and versions."""
    cores = "1 core" if origin.cores == 1 else f"{origin.cores} cores"
    return (
        f"{origin.machine}, {cores}, {origin.system}; Python {origin.python}, torch {origin.torch}, gradwire "
        f"{origin.gradwire}."
    )


def to_markdown(summary: Summary) -> str:
    """The whole report, for a pull request.

    Args:
        summary: What to show.

    Returns:
        Markdown.

    Examples:
        >>> print(gradwire.report.to_markdown(summary))
    """
    parts = ["## gradwire: does compression pay?", "", heading(summary), ""]
    parts += [section(group) for group in summary.groups]
    alike = [groups for _, members in summary.by_ranks() for groups in by_latency(members)]
    points = [text for groups in alike for text in crossover_texts(groups)]
    if points:
        parts += ["### Where the hooks begin to pay", "", *(f"- {text}" for text in points), ""]
    return "\n".join([*parts, origin_text(summary.origin)]) + "\n"


def section(group: Group) -> str:
    """One group: the recommendation and the table."""
    advice, shown = advise(group), columns(group)
    lines = [f"### {group.name[0].upper()}{group.name[1:]}", "", f"**{advice.title}.** {advice.reason}"]
    if advice.code:
        lines += ["", f"    {advice.code}"]
    head = ["hook", *(column.head for column in shown)]
    rows = [[name(row), *(column.text(row, group) for column in shown)] for row in group.rows]
    table = markdown_table([head, *rows], right=range(1, len(head)))
    return "\n".join([*lines, "", table, "", *notes(group), ""])
