"""The recommendation of a report: by `recommend` from measured rows, or the one that `gradwire advise` has made."""

import math
import statistics
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gradwire.tools.launch.link import Link
from gradwire.tools.measure import advise as measured
from gradwire.tools.records.recommend import BASELINE, Option, Recommendation, recommend
from gradwire.tools.records.records import NO_LINK, PLAIN, Cell, Origin, Record, Run, Settings, median_uncertainty
from gradwire.tools.report.summary import Group, Row

SAME_LOSS = 0.02
"""Final losses in nats per byte that differ by less than this count as equal: another seed changes them by more."""
FEW_STEPS = 8
"""Fewer timed steps than this are not enough to compare step times."""


def advise(group: Group) -> Recommendation:
    """Which hook to use on the link and ranks of a group, from its measured rows alone.

    Args:
        group: A group of `Summary.groups`.

    Returns:
        The recommended hook, or none, and the reason.

    Examples:
        >>> gradwire.report.advise(summary.groups[0])
    """
    if group.exact is None or group.noop is None:
        missing = " and ".join(hook for hook in ("exact", "noop") if group.row(hook) is None)
        return Recommendation(None, "No recommendation", f"There is no measurement of {missing} to compare with.")
    if (timed := len(group.exact.record.step_s)) < FEW_STEPS:
        reason = f"There are only {timed} timed steps, and at least {FEW_STEPS} are needed."
        return Recommendation(None, "No recommendation", reason)
    rows = [row for row in group.rows if row.record.averages and row.hook != PLAIN]
    return recommend([_option(row, group.exact) for row in rows], ceiling=group.ceiling)


def _option(row: Row, exact: Row) -> Option:
    record = row.record
    return Option(
        hook=row.hook,
        step_s=record.median_s,
        error=record.gradient_error,
        quartiles_s=record.quartiles_s,
        uncertainty=median_uncertainty(record.step_s),
        excluded="" if row.hook == BASELINE else _excluded(record, exact.record),
    )


def _excluded(record: Record, exact: Record) -> str:
    """Why a hook must not be recommended; empty if it may."""
    if not record.kept_promises:
        return "Hook.verify() failed"
    if not record.identical:
        return "the parameters of the ranks differ"
    if not record.loss <= exact.loss + SAME_LOSS:  # also for NaN
        return f"loss {record.loss:.3f} against {exact.loss:.3f} with exact"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of `gradwire advise`, which a page shows in place of a recommendation from its own records."""

    advice: Recommendation
    lead: str
    """What was trained and how, for the top of the page."""
    step_s: float
    """Step time with communication."""
    exposed_s: float
    """The part of it that communication adds."""
    predictions: str
    """The predicted step times of all hooks."""


def finding(advice: measured.Advice, lead: str) -> Finding:
    """The recommendation and the headroom, for a page that opens with `lead`."""
    step_s, exposed_s = statistics.median(advice.headroom.with_s), max(advice.headroom.exposed_s, 0.0)
    return Finding(
        advice=advice.recommendation, lead=lead, step_s=step_s, exposed_s=exposed_s, predictions=_predictions(advice)
    )


def _predictions(advice: measured.Advice) -> str:
    rows = sorted(advice.rows, key=lambda row: row.predicted_s)
    times = (f"{row.hook} {1e3 * row.predicted_s:.1f} ±{row.uncertainty:.0%}" for row in rows)
    return f"Predicted step times in ms, before anything was measured: {', '.join(times)}"


def runs_of(advice: measured.Advice) -> list[Run]:
    """One run for every hook that was measured, or for `exact` alone if no hook had to be.

    The loss of a user's script is not known: it is NaN here.
    """
    began, link = datetime.now(UTC).isoformat(timespec="seconds"), advice.headroom.link
    rows = [row for row in advice.rows if row.step_s] or [_exact_alone(advice)]
    return [
        Run(
            cell=Cell(0, advice.headroom.ranks, link or NO_LINK, row.hook),
            repeats=1,
            link_bits_per_s=None if link is None else Link.parse(link).bits_per_s,
            settings=Settings(steps=len(rows[0].step_s)),
            origin=Origin.here(),
            began=began,
            split=row.split,
            losses=(),
            record=_record(row, advice.params),
        )
        for row in rows
    ]


def _exact_alone(advice: measured.Advice) -> measured.Row:
    """The baseline with the step times of the headroom."""
    exact = next(row for row in advice.rows if row.hook == BASELINE)
    return replace(exact, step_s=advice.headroom.with_s)


def _record(row: measured.Row, params: int) -> Record:
    return Record(
        hook=row.hook,
        steps=len(row.step_s),
        step_s=row.step_s,
        sent_bytes=row.sent_bytes,
        sent_is_counted=True,
        gradient_error=row.error,
        loss=math.nan,
        averages=True,
        identical=True,
        verified="",
        kept_promises=True,
        params=params,
    )
