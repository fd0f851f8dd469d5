"""From the runs of `gradwire compare` to a sentence about every hook: does it hurt, and when does it reach a loss?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.tools.records.curves import Curve
from gradwire.tools.records.jsonl import RecordsError
from gradwire.tools.records.paired import Gap, final, gap_of, seeds_needed, smoothed, window_of
from gradwire.tools.records.recommend import PAYS

TOLERANCE = 0.005
"""Gaps below this part of the loss count as small, and so do those below the spread between seeds."""
HURTS, SLIGHT, FINE, UNKNOWN, FAILED = "hurts", "hurts a little", "no harm seen", "cannot tell", "failed"
"""The verdicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One hook or variant."""

    name: str
    hook: str
    finals: Mapping[int, float]
    """By seed, the mean loss at the end."""
    gap: Gap | None
    """None for the reference, and if a run failed or diverged."""
    verdict: str
    """HURTS, SLIGHT, FINE, UNKNOWN or FAILED; empty for the reference."""
    sentence: str
    curves: Mapping[int, tuple[float, ...]]
    """By seed, the smoothed loss of every step."""
    step_s: float
    """The median over the seeds of the median step time."""
    sent_bytes: float | None
    reached: int | None
    """The first step at which `curve` is at the target; None if it never is."""

    @property
    def reached_s(self) -> float | None:
        """The same in seconds."""
        return None if self.reached is None else self.reached * self.step_s

    @property
    def curve(self) -> tuple[float, ...]:
        """By step, the mean over the seeds."""
        return _means(self.curves.values())

    def gaps(self, reference: Row) -> list[tuple[float, ...]]:
        """For every seed, by step, the smoothed loss minus that of the reference."""
        pairs = [(curve, reference.curves[seed]) for seed, curve in self.curves.items() if seed in reference.curves]
        return [tuple(ours - theirs for ours, theirs in zip(*pair, strict=True)) for pair in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that a report shows."""

    rows: tuple[Row, ...]
    """The first one is the reference."""
    seeds: tuple[int, ...]
    steps: int
    """The steps that all runs have trained."""
    window: int
    """The number of steps that count as the end."""
    spread: float
    """The standard deviation of the reference's final loss between seeds; NaN for one seed."""
    tolerance: float
    """Gaps below this count as small."""
    target: float
    """The loss whose time is reported."""
    metric: str | None
    ranks: int
    link: str | None
    script: tuple[str, ...]

    @property
    def reference(self) -> Row:
        """What the others are compared with."""
        return self.rows[0]

    @property
    def first(self) -> Row | None:
        """The row that reaches the target in the least time."""
        reached = [row for row in self.rows if row.reached_s is not None and not math.isnan(row.reached_s)]
        return min(reached, key=lambda row: row.reached_s or 0.0, default=None)

    @property
    def best(self) -> Row:
        """What to use: of the reference and the rows without harm the first to reach the target, if that pays."""
        fine = [row for row in self.rows[1:] if row.verdict in (FINE, SLIGHT) and row.reached_s is not None]
        first = min(fine, key=lambda row: row.reached_s or 0.0, default=self.reference)
        mine, theirs = first.reached_s, self.reference.reached_s
        return first if mine and theirs and theirs >= PAYS * mine else self.reference

    def recommendation(self) -> str:
        """The same in a sentence."""
        best, reference = self.best, self.reference
        if best is reference or best.reached_s is None or reference.reached_s is None:
            others = "of the others that do no harm, none reaches"
            return f"Use {reference.name}: {others} a loss of {self.target:.4g} at least {PAYS:.2f}x as fast."
        return (
            f"Use {best.name}: it reaches a loss of {self.target:.4g} after {best.reached_s:.1f} s, {reference.name} "
            f"after {reference.reached_s:.1f} s ({reference.reached_s / best.reached_s:.2f}x), and {best.sentence}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without the curves."""
        rows = [_row_dict(row) for row in self.rows]
        first = self.first
        return {
            "script": list(self.script),
            "ranks": self.ranks,
            "link": self.link,
            "metric": self.metric,
            "steps": self.steps,
            "window": self.window,
            "seeds": list(self.seeds),
            "reference": self.reference.name,
            "seed_spread": self.spread,
            "tolerance": self.tolerance,
            "target_loss": self.target,
            "first_to_target": None if first is None else first.name,
            "best": self.best.name,
            "rows": rows,
        }


def _row_dict(row: Row) -> dict[str, Any]:
    gap = row.gap
    return {
        "name": row.name,
        "hook": row.hook,
        "final_loss": statistics.fmean(row.finals.values()) if row.finals else None,
        "final_loss_by_seed": {str(seed): value for seed, value in row.finals.items()},
        "verdict": row.verdict,
        "sentence": row.sentence,
        "gap": None if gap is None else gap.mean,
        "gap_by_seed": None if gap is None else {str(seed): value for seed, value in gap.by_seed.items()},
        "half_width": None if gap is None else gap.half_width,
        "smallest_visible_gap": None if gap is None else gap.visible,
        "degrees_of_freedom": None if gap is None else gap.df,
        "step_s": row.step_s,
        "sent_bytes": row.sent_bytes,
        "steps_to_target": row.reached,
        "seconds_to_target": row.reached_s,
    }


def conclude(
    curves: Sequence[Curve], names: Sequence[str], *, target: float | None = None, tolerance: float | None = None
) -> Comparison:
    """Compare the runs of `names`, the first of which is the reference.

    Args:
        curves: All runs; of the reference there must be one that did not fail.
        names: The hooks and variants to show, in this order.
        target: The training loss whose time is reported; by default the final one of the reference plus the tolerance.
        tolerance: Gaps below this count as small; by default the spread between seeds, or TOLERANCE of the loss if that
            is more.
    """
    good = {name: {c.seed: c for c in curves if c.name == name and _is_finite(c)} for name in names}
    reference = good[names[0]]
    steps = min(len(c.losses) for by_seed in good.values() for c in by_seed.values())
    window = window_of(steps)
    finals = {name: {s: _final(c, steps, window) for s, c in sorted(each.items())} for name, each in good.items()}
    base = finals[names[0]]
    mean, spread = statistics.fmean(base.values()), statistics.stdev(base.values()) if len(base) > 1 else math.nan
    if tolerance is None:
        tolerance = max(TOLERANCE * abs(mean), 0.0 if math.isnan(spread) else spread)
    gaps = {n: {s: finals[n][s] - base[s] for s in finals[n] if s in base} for n in names[1:]}
    target = final_of(reference.values(), steps, window) + tolerance if target is None else target
    some = next(iter(reference.values()))
    scale = Scale(spread, tolerance)
    return Comparison(
        rows=tuple(_row(n, curves, finals[n], gaps, scale, steps, window, target) for n in names),
        seeds=tuple(sorted(base)),
        steps=steps,
        window=window,
        spread=spread,
        tolerance=tolerance,
        target=target,
        metric=some.conditions.metric,
        ranks=some.ranks,
        link=some.conditions.link,
        script=some.conditions.script,
    )


def conclude_all(curves: Sequence[Curve]) -> Comparison:
    """Compare all runs of a file. The first hook or variant in it is the reference.

    Raises:
        RecordsError: No run of the reference has ended well, so that there is nothing to compare with.
    """
    names = list(dict.fromkeys(curve.name for curve in curves))
    if not any(curve.name == names[0] and _is_finite(curve) for curve in curves):
        raise RecordsError(f"no run of the reference {names[0]} has ended well; run `gradwire compare` again")
    return conclude(curves, names)


def _is_finite(curve: Curve) -> bool:
    return not curve.failed and curve.diverged_at is None


def _final(curve: Curve, steps: int, window: int) -> float:
    """The last logged value of the metric, or else the mean of the last losses."""
    return curve.metric[-1][1] if curve.conditions.metric is not None else final(curve.losses[:steps], window)


def final_of(curves: Any, steps: int, window: int) -> float:
    """The mean over the seeds of the training loss at the end, whatever the metric is."""
    return statistics.fmean(final(curve.losses[:steps], window) for curve in curves)


@dataclass(frozen=True, slots=True)
class Scale:
    """What a gap is measured by."""

    spread: float
    tolerance: float

    def in_spreads(self, gap: float) -> str:
        """In units of the spread between seeds; empty if there is none."""
        return f"{abs(gap) / self.spread:.1f} x the spread between seeds" if self.spread > 0 else ""


def _row(
    name: str,
    curves: Sequence[Curve],
    finals: Mapping[int, float],
    gaps: Mapping[str, Mapping[int, float]],
    scale: Scale,
    steps: int,
    window: int,
    target: float,
) -> Row:
    mine = [curve for curve in curves if curve.name == name]
    shown = {curve.seed: tuple(smoothed(curve.losses[:steps], window)) for curve in mine if _is_finite(curve)}
    mean = _means(shown.values())
    times = [curve.step_s for curve in mine if not math.isnan(curve.step_s)]
    lost = any(curve.failed or curve.diverged_at is not None for curve in mine)  # then the other seeds prove little
    gap = gap_of(gaps[name]) if gaps.get(name) and not lost else None
    verdict, sentence = ("", "the reference") if name not in gaps else judge(mine, gap, scale)
    return Row(
        name=name,
        hook=mine[0].hook if mine else name,
        finals=finals,
        gap=gap,
        verdict=verdict,
        sentence=sentence,
        curves=shown,
        step_s=statistics.median(times) if times else math.nan,
        sent_bytes=next((curve.sent_bytes for curve in mine if curve.sent_bytes is not None), None),
        reached=None
        if lost
        else next((at for at, loss in enumerate(mean, 1) if at >= window and loss <= target), None),
    )


def _means(curves: Iterable[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(statistics.fmean, zip(*curves, strict=True)))


def judge(curves: Sequence[Curve], gap: Gap | None, scale: Scale) -> tuple[str, str]:
    """The verdict about a hook and the sentence that explains it."""
    failed = next((curve for curve in curves if curve.failed), None)
    if failed is not None or not curves:
        lines = failed.failed.strip().splitlines() if failed is not None else ["it has not been run"]
        return FAILED, f"failed: {lines[0] if len(lines) == 1 else f'{lines[0]} ... {lines[-1]}'}"
    lost = [curve for curve in curves if curve.diverged_at is not None]
    if lost:
        at = min(curve.diverged_at or 0 for curve in lost)
        return HURTS, f"hurts: the loss is not finite from step {at} on ({len(lost)} of {len(curves)} seeds)"
    assert gap is not None
    if not any(gap.by_seed.values()) and len(gap.by_seed) > 1:
        return FINE, "no harm seen: the losses are the same"
    return _by_interval(gap, scale)


def _by_interval(gap: Gap, scale: Scale) -> tuple[str, str]:
    digits = f".{decimals(min(gap.half_width, scale.tolerance))}f"
    mean, half, visible = f"{gap.mean:+{digits}}", f"{gap.half_width:{digits}}", f"{gap.visible:{digits}}"
    if math.isinf(gap.half_width):
        return UNKNOWN, f"cannot tell: one seed with a gap of {mean} shows no spread; use --seeds 3 or more"
    units = scale.in_spreads(gap.mean)
    size = f"{mean} +- {half}" + (f", {units}" if units else "")
    if gap.low > 0:
        verdict = SLIGHT if gap.high < scale.tolerance else HURTS
        return verdict, f"{verdict}: {size}"
    if gap.visible <= scale.tolerance or gap.high <= 0:
        better = " and the loss is lower" if gap.high < 0 else ""
        return FINE, f"no harm seen{better} (gap {mean} +- {half}; a gap above {visible} would have been seen)"
    need = seeds_needed(gap, scale.tolerance)
    more = f"use about {need} seeds, or more steps" if need else "use more seeds or steps"
    return UNKNOWN, f"cannot tell: gap {mean} +- {half}, and only a gap above {visible} would have been seen; {more}"


def decimals(size: float) -> int:
    """As many as it takes to show two digits of `size`, and 4 if that says nothing."""
    if not 0 < size < math.inf:
        return 4
    return min(max(1 - math.floor(math.log10(size)), 0), 7)
