"""What `advise` found, as the page of `gradwire report`."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from datetime import UTC, datetime

from gradwire.tools.launch.link import Link
from gradwire.tools.measure.advise import Advice, Row
from gradwire.tools.records.records import NO_LINK, Cell, Origin, Record, Run, Settings
from gradwire.tools.report.advice import Advice as Recommendation
from gradwire.tools.report.page import Finding, to_html
from gradwire.tools.report.summary import summarise


def to_page(found: Advice) -> str:
    """HTML, with a row for every hook that was measured."""
    runs = runs_of(found)
    steps = len(runs[0].record.step_s)
    lead = (
        f"A model of {found.params / 1e6:.3g}M parameters on {found.headroom.ranks} ranks, while its own script "
        f"trained it. Hooks took turns, {steps} timed steps each. Step times are medians with quartiles, the slowest "
        "rank counts. Speed-ups are against the hook exact, which sends what plain DDP sends."
    )
    return to_html(summarise(runs), finding(found, lead))


def finding(found: Advice, lead: str) -> Finding:
    """The recommendation and the headroom, for a page that opens with `lead`."""
    made = found.recommendation
    step_s = statistics.median(found.headroom.with_s)
    advice = Recommendation(made.hook, made.title, made.reason)
    return Finding(advice=advice, lead=lead, step_s=step_s, exposed_s=max(found.headroom.exposed_s, 0.0))


def runs_of(found: Advice) -> list[Run]:
    """A run for every hook that was measured; none had to be if `exact` alone was within the error.

    A script's loss is its own business: it is NaN here.
    """
    began = datetime.now(UTC).isoformat(timespec="seconds")
    link = found.headroom.link
    measured = [row for row in found.rows if row.step_s] or [_exact_alone(found)]
    return [
        Run(
            cell=Cell(0, found.headroom.ranks, link or NO_LINK, row.hook),
            repeats=1,
            link_bits_per_s=None if link is None else Link.parse(link).bits_per_s,
            settings=Settings(steps=len(measured[0].step_s)),
            origin=Origin.here(),
            began=began,
            split=row.split,
            losses=(),
            record=_record(row, found.params),
        )
        for row in measured
    ]


def _exact_alone(found: Advice) -> Row:
    """Timed by the headroom."""
    exact = next(row for row in found.rows if row.hook == "exact")
    return replace(exact, step_s=found.headroom.with_s)


def _record(row: Row, params: int) -> Record:
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
