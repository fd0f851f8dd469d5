"""What `peers.py` measured, as a table, as a page (peers.md) and as a chart (peers.svg)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from error_plot import stroke, text

Row = dict[str, Any]
HEADER = ("", "MB sent", "error of the mean", "step, ms", "min-max", "exposed, ms", "CPU, ms", "same bits")
LABELS = {
    "plain": "DDP without a hook",
    "noop": "no communication",
    "diloco": "gradwire DiLoCo, every 20 steps",
    "epfml": "epfml/powersgd",
    "deepspeed": "DeepSpeed",
    "grace": "GRACE",
    "torchft": "torchft",
    "bagua": "Bagua",
    "pccl": "PCCL",
}
PAGE = """# Beside other packages

Recorded on {date} by `benchmarks/peers.py`, which installs the packages and says how they are used. To repeat it, as
root: `python benchmarks/peers.py --page`. It takes less than ten minutes.

{note}**Settings.** {ranks} hosts (network namespaces, one core each) whose sending rate is limited to {rate}, a model
of 8 x Linear(1024, 1024) with 8.4 M parameters, batch 64, forward and backward without an optimizer. Every package runs
as its own documentation says, in processes that take turns with the others, {rounds} rounds each. All use the same
torch.

- **MB sent** is the counter of the network interface, per step and rank. For DiLoCo it is the mean over 20 steps.
- **Error of the mean** is |result - mean| / |mean| of the second step or later, with the mean in float64.
- **Step** is the median over the rounds of the slowest rank, with the least and the largest round.
- **Exposed** is the step minus that without communication (`noop`).
- **CPU** is the user and system time of one rank per step, all threads. Processes that a package starts are not in it.

{table}

![Step time of every package](peers.svg)

## What these rows are not

- gradwire and torch's hooks overlap with backward. epfml/powersgd and GRACE have no hook for DDP: they average
  when backward is done.
- torchft's rows include its quorum and its vote in every step, which is what a user gets for fault tolerance.
- One model, one link and two hosts on one machine. Nothing here ran on a GPU.
"""


def label(name: str) -> str:
    """What the table calls a row."""
    kind, _, option = name.partition(":")
    if kind in LABELS:
        return LABELS[kind] + (f", {option}" if option else "")
    return name.replace("torch:", "torch ") if kind == "torch" or " " in name else f"gradwire `{name}`"


def is_ours(name: str) -> bool:
    """Whether a row is gradwire's."""
    return label(name).startswith("gradwire")


def step_ms(row: Row) -> float:
    """The median."""
    return statistics.median(row["step_ms"])


def table(rows: Sequence[Row]) -> str:
    """Markdown: rows that ran in the order of their steps, then those that failed."""
    ran = sorted((row for row in rows if "failed" not in row), key=step_ms)
    quiet = next((step_ms(row) for row in ran if row["hook"] == "noop"), None)
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    lines += [f"| {' | '.join(cells(row, quiet))} |" for row in ran]
    failed = [row for row in rows if "failed" in row]
    return "\n".join([*lines, "", *(f"- {label(row['hook'])}: {row['failed']}" for row in failed)])


def cells(row: Row, quiet: float | None) -> list[str]:
    """One row of the table."""
    times, name = row["step_ms"], label(row["hook"])
    error = "-" if row["error"] is None or row["hook"] == "noop" else f"{row['error']:.1e}"
    same = "-" if row["identical"] is None or row["hook"] == "noop" else "yes" if row["identical"] else "no"
    exposed = "-" if quiet is None else f"{step_ms(row) - quiet:.0f}"
    spread = f"{min(times):.0f}-{max(times):.0f}"
    cpu = f"{statistics.median(row['cpu_ms']):.0f}"
    return [name, f"{row['sent_mb']:.2f}", error, f"{step_ms(row):.0f}", spread, exposed, cpu, same]


def write(rows: Sequence[Row], folder: Path, note: str = "") -> None:
    """The page, with a remark at its beginning, and the chart."""
    first = next(row for row in rows if "failed" not in row)
    named = {key: first[key] for key in ("date", "ranks", "rate")}
    page = PAGE.format(**named, rounds=len(first["step_ms"]), table=table(rows), note=f"**{note}**\n\n" if note else "")
    (folder / "peers.md").write_text(page)
    (folder / "peers.svg").write_text(chart(rows))


# -- the chart ---------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 960, 300, 150, 60, 18, 8
OURS, OTHERS, QUIET = "#2563c9", "#d9722e", "#9aa3af"


def chart(rows: Sequence[Row]) -> str:
    """A bar per row, as long as its step, with the range of its rounds and its bytes."""
    ran = sorted((row for row in rows if "failed" not in row), key=step_ms)
    height = TOP + len(ran) * (BAR + GAP) + 50
    longest = max(max(row["step_ms"]) for row in ran)
    per_ms = (WIDTH - LEFT - RIGHT) / longest
    style = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="13" fill="#1f2937"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fcfcfd"/>',
        text(LEFT, 24, f"Step time on {ran[0]['ranks']} hosts at {ran[0]['rate']}, 8.4 M parameters (ms)"),
        text(LEFT, 44, "The line is the range of the rounds; MB sent per step and rank are to the right.", more=SMALL),
    ]
    for index, row in enumerate(ran):
        parts += bar(row, TOP + index * (BAR + GAP), per_ms)
    return "\n".join([*parts, *legend(height), "</svg>", ""])


SMALL = 'font-size="11" fill="#6b7280"'


def bar(row: Row, y: float, per_ms: float) -> list[str]:
    """One row of the chart."""
    step, times, name = step_ms(row), row["step_ms"], label(row["hook"]).replace("`", "")
    colour = QUIET if row["hook"] == "noop" else OURS if is_ours(row["hook"]) else OTHERS
    end, middle = LEFT + step * per_ms, y + BAR / 2
    reach = [LEFT + value * per_ms for value in (min(times), max(times))]
    title = f"<title>{escape(name)}: {step:.0f} ms, {row['sent_mb']:.2f} MB</title>"
    return [
        text(LEFT - 10, y + 14, name, "end"),
        f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" rx="2" fill="{colour}">{title}</rect>',
        stroke(reach[0], middle, reach[1], middle, "#1f2937", 1.2),
        text(max(end, reach[1]) + 8, y + 14, f"{step:.0f}  ({row['sent_mb']:.1f} MB)"),
    ]


def legend(height: float) -> list[str]:
    """What the colours mean."""
    parts, x = [], float(LEFT)
    for colour, words in ((OURS, "gradwire"), (OTHERS, "others"), (QUIET, "no communication")):
        parts += [
            f'<circle cx="{x:.1f}" cy="{height - 22}" r="5.5" fill="{colour}"/>',
            text(x + 12, height - 18, words),
        ]
        x += 60 + 7.6 * len(words)
    return parts
