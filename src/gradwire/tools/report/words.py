"""Sentences that the page and the markdown share."""

from __future__ import annotations

from gradwire.tools.records.records import Origin
from gradwire.tools.report.summary import Summary


def heading(summary: Summary) -> str:
    """What was trained, and how often."""
    repeats = max(row.repeats for group in summary.groups for row in group.rows)
    settings = summary.settings
    runs = "1 run" if repeats == 1 else f"{repeats} runs"
    turn = min(settings.round_steps, settings.steps)
    return (
        f"A GPT of {summary.params / 1e6:.1f}M parameters, {settings.steps} steps under each hook, {runs} a cell, seed "
        f"{settings.seed}{' and up' if repeats > 1 else ''}; hooks take turns, {turn} "
        f"steps at a time. Links other than none are emulated. Step times are medians with quartiles, the slowest rank "
        "counts. Speed-ups are against the hook exact, which sends what plain DDP sends."
    )


def origin(made: Origin) -> str:
    """Where the numbers come from."""
    cores = "1 core" if made.cores == 1 else f"{made.cores} cores"
    return (
        f"{made.machine}, {cores}, {made.system}; Python {made.python}, torch {made.torch}, gradwire {made.gradwire}."
    )
