"""The result of `gradwire selfcheck` as a table of text, which fits into an issue, and as a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.tools.records.table import label, ms, text_table
from gradwire.tools.report.page import render

HEADS = (
    "hook",
    "kernels",
    "mean",
    "training",
    "error",
    "step ms",
    "wait ms",
    "encode ms",
    "wire ms",
    "decode ms",
    "MB sent",
    "encode/copy",
    "decode/copy",
)
LEGEND = (
    "kernels: the bits of the torch kernels on the CPU. mean: the bits, or the tolerance, of the exchange's reference. "
    "training: a small GPT trains and Hook.verify() passes. error: of a mean of normal values. encode/copy and "
    "decode/copy: time of a codec relative to a copy of the same float32 values. Times are for information."
)


def cells(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row for each hook, below the heads."""
    return [HEADS, *(_row(row) for row in result["rows"])]


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    times = ("step_s", "wait_s", "encode_s", "wire_s", "decode_s")
    return (
        label(row["hook"]),
        *(_verdict(row[part]) for part in ("kernels", "mean", "training")),
        _number(row["error"], "{:.1e}"),
        *("-" if row[name] is None else ms(row[name]) for name in times),
        _number(None if row["sent_bytes"] is None else row["sent_bytes"] / 1e6, "{:.2f}"),
        *(_number(row[name], "{:.1f}") for name in ("encode_copies", "decode_copies")),
    )


def _verdict(texts: Sequence[str] | None) -> str:
    return "-" if texts is None else "WRONG" if texts else "ok"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def title(result: Mapping[str, Any]) -> str:
    """What was checked, in one line."""
    facts = result["facts"]
    hosts, models = (sorted({fact[key] for fact in facts}) for key in ("host", "name"))
    first, hosts_text = facts[0], f"{len(hosts)} host{'s' * (len(hosts) > 1)}"
    where = f"{result['ranks']} ranks on {hosts_text}, {first['device']} ({', '.join(models)})"
    return f"{first['versions']}; {where}; {first['kernels']} kernels; {platform_text(result)}"


def platform_text(result: Mapping[str, Any]) -> str:
    """The backend, and how long the check took."""
    return f"backend {result['backend']}; {result['took_s']:.0f} s"


def verdict(result: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    if result["passed"]:
        return f"Everything is right: {len(result['rows'])} rows without a difference."
    return f"{len(result['failures'])} things are wrong."


def to_text(result: Mapping[str, Any]) -> str:
    """The table, what is wrong, and the verdict."""
    table = text_table(cells(result), right=range(4, len(HEADS)))
    return "\n\n".join([title(result), table, LEGEND, *result["failures"], verdict(result)])


def to_html(result: Mapping[str, Any]) -> str:
    """The same as a page."""
    head, *rows = cells(result)
    return render(
        "selfcheck.html.j2",
        choices=[],
        lead=title(result),
        verdict=verdict(result),
        failures=result["failures"],
        heads=head,
        rows=rows,
        legend=LEGEND,
    )
