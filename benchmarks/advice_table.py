"""The tables and goals of `advice.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

CLOSE, BEHIND_BEST, BEHIND_BASE = 0.15, 0.05, 0.03
BASES = ("plain", "bf16")


def off(row: Mapping[str, Any]) -> float | None:
    """The error of the prediction."""
    return None if row["predicted_ms"] is None else row["predicted_ms"] / statistics.median(row["step_ms"]) - 1


def behind(cell: Mapping[str, Any], hook: str) -> float:
    """How much slower what `auto` took is than `hook`, which may be the same: the median over the rounds."""
    return statistics.median(_ratios(cell, hook)) - 1


def spread(cell: Mapping[str, Any], hook: str) -> float:
    """The standard error of that, were it a mean: half the distance of the quartiles is 0.67 deviations."""
    ratios = _ratios(cell, hook)
    low, _, high = statistics.quantiles(ratios)
    return (high - low) / 1.35 / math.sqrt(len(ratios))


def _ratios(cell: Mapping[str, Any], hook: str) -> list[float]:
    duel = cell["duel_ms"]
    return [mine / other for mine, other in zip(duel["auto"], duel[hook], strict=True)]


def best(cell: Mapping[str, Any]) -> str:
    """The fastest of the hooks that `auto` was allowed to take, and of DDP without one."""
    able = [row for row in cell["hooks"] if row["hook"] not in ("auto", "noop") and row["error"] <= cell["max_error"]]
    return str(min(able, key=lambda row: statistics.median(row["step_ms"]))["hook"])


def goals(cell: Mapping[str, Any]) -> dict[str, bool]:
    """Each goal of a cell, and whether it is met."""
    met = {f"predict {row['hook']}": abs(off(row)) <= CLOSE for row in cell["hooks"] if off(row) is not None}  # type: ignore[arg-type]
    met[f"auto against {best(cell)}"] = behind(cell, best(cell)) <= BEHIND_BEST
    return met | {f"auto against {base}": behind(cell, base) <= BEHIND_BASE for base in BASES}


def print_cell(cell: Mapping[str, Any]) -> None:
    """A row a hook, and how `auto` fares."""
    print(f"\n{cell['ranks']} hosts, {cell['rate']}, {cell['workload']}: ms a step, median of {cell['rounds']} rounds")
    print(f"{'hook':<10}{'measured':>10}  {'min-max':<14}{'predicted':>10}{'':>7}{'error of the mean':>20}")
    for row in cell["hooks"]:
        ends = f"{min(row['step_ms']):.1f}-{max(row['step_ms']):.1f}"
        miss = off(row)
        told = f"{'':>17}" if miss is None else f"{row['predicted_ms']:>10.1f}{miss:>+7.0%}"
        print(f"{row['hook']:<10}{statistics.median(row['step_ms']):>10.1f}  {ends:<14}{told}{row['error']:>20.2g}")
    pairs = ((best(cell), "the best in hindsight", BEHIND_BEST), *((base, base, BEHIND_BASE) for base in BASES))
    for hook, name, limit in pairs:
        found = f"{behind(cell, hook):+.1%} (standard error {spread(cell, hook):.1%})"
        print(f"auto against {name} ({hook}), {len(cell['duel_ms']['auto'])} rounds: {found}, at most {limit:+.0%}")
    print(f"auto, after {cell['auto_steps']} steps and {cell['auto_s']:.0f} s, took {cell['auto_reason']}", flush=True)


def print_summary(cells: Sequence[Mapping[str, Any]]) -> bool:
    """How many goals are met; whether all are."""
    met = [(f"{cell['workload']}, {cell['rate']}: {goal}", ok) for cell in cells for goal, ok in goals(cell).items()]
    for kind in ("predict", "auto"):
        ones = [ok for goal, ok in met if f": {kind} " in goal]
        print(f"\n{kind}: {sum(ones)} of {len(ones)} within the goal", end="")
    print("".join(f"\nmissed: {goal}" for goal, ok in met if not ok))
    return all(ok for _, ok in met)
