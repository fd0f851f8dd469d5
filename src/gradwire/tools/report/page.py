"""The report as one HTML page. Texts and layout are in templates/*.j2; this file computes what they show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradwire.errors import GradwireError
from gradwire.tools.measure.advise import Advice
from gradwire.tools.records.table import ms
from gradwire.tools.report import charts
from gradwire.tools.report.advice import Finding, advise, finding, runs_of
from gradwire.tools.report.summary import Group, Summary, by_latency, crossover_texts, summarise
from gradwire.tools.report.svg import Chart
from gradwire.tools.report.tables import columns, heading, name, notes, origin_text

if TYPE_CHECKING:
    from jinja2 import Environment


def environment() -> Environment:
    """The templates of this package. GradwireError if jinja2 is not installed."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise GradwireError("a page needs jinja2, which is not installed: pip install 'gradwire[cli]'") from error
    made = Environment(
        loader=PackageLoader("gradwire.tools.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["ms"] = ms
    return made


def render(template: str, **values: Any) -> str:
    """Fill a template of this package."""
    return environment().get_template(template).render(values).lstrip() + "\n"


def to_html(summary: Summary, result: Finding | None = None) -> str:
    """The whole report as a page.

    Args:
        summary: What to show.
        result: Takes the place of the recommendation and headroom that the records give.

    Returns:
        One file of HTML that needs no network.

    Examples:
        >>> Path("report.html").write_text(gradwire.report.to_html(summary))
    """
    return render(
        "report.html.j2",
        summary=summary,
        choices=[group.name for group in summary.groups],
        lead=heading(summary) if result is None else result.lead,
        parts={**charts.STEP_PARTS, **charts.WORK_PARTS},
        groups=[_group(index, group, result) for index, group in enumerate(summary.groups)],
        by_ranks=[_ranks(ranks, groups, summary) for ranks, groups in summary.by_ranks()],
        origin=origin_text(summary.origin),
        with_seed=any(row.losses for group in summary.groups for row in group.rows),  # a user's script has its own
    )


def advice_to_html(advice: Advice) -> str:
    """The page of `gradwire advise`, with a row for every hook that was measured."""
    runs = runs_of(advice)
    lead = (
        f"A model of {advice.params / 1e6:.3g}M parameters on {advice.headroom.ranks} ranks was measured while its own "
        f"script trained it. The hooks took turns, with {len(runs[0].record.step_s)} timed steps each. Step times are "
        "medians with quartiles over the steps of the slowest rank. Speed-ups are relative to the hook exact, which "
        f"sends what plain {'FSDP2' if advice.headroom.is_sharded else 'DDP'} sends."
    )
    return to_html(summarise(runs), finding(advice, lead))


def _group(index: int, group: Group, result: Finding | None) -> dict[str, Any]:
    """What the page shows while a link and number of ranks are chosen."""
    shown = columns(group)
    chart, words = _headroom(index, group, result)
    return {
        "name": group.name,
        "advice": advise(group) if result is None else result.advice,
        "headroom": chart,
        "headroom_text": words,
        "stack": charts.stack(f"stack-{index}", group),
        "heads": ["hook", *(column.head for column in shown)],
        "rows": [
            {
                "hook": row.hook,
                "name": name(row),
                "cells": [(column.text(row, group), column.value(row, group)) for column in shown],
            }
            for row in group.rows
        ],
        "notes": notes(group) + ([] if result is None else [result.predictions]),
    }


def _headroom(index: int, group: Group, result: Finding | None) -> tuple[Chart | None, str]:
    if result is not None:
        exact_s, noop_s = result.step_s, result.step_s - result.exposed_s
    elif group.exact is not None and group.noop is not None:
        exact_s, noop_s = group.exact.record.median_s, group.noop.record.median_s
    else:
        return None, "There are no runs of exact and noop to compare."
    times = f"{ms(exact_s)} ms a step with the exact exchange, {ms(noop_s)} ms with none"
    chart = charts.headroom(f"headroom-{index}", group.name, exact_s, noop_s)
    return chart, f"At most {exact_s / noop_s:.2f}x: {times}."


def _ranks(ranks: int, groups: Sequence[Group], summary: Summary) -> dict[str, Any]:
    """What compares links, and what does not depend on them, for one number of ranks."""
    alike, key, single = by_latency(groups), f"speed-up-{ranks}", len(groups) == 1
    keys = [key, *(f"{key}-{at}" for at in range(1, len(alike)))]
    lines = [charts.speed_up_lines(each, members, summary.hooks) for each, members in zip(keys, alike, strict=True)]
    return {
        "ranks": ranks,
        "classes": " ".join(f"group-{summary.groups.index(group)}" for group in groups),
        "single": single,
        "speed_ups": [charts.speed_up_bars(key, groups[0])] if single else lines,
        "crossovers": [words for members in alike for words in crossover_texts(members)],
        "error": charts.bits_and_error(f"error-{ranks}", groups[0], summary.hooks),
        "losses": charts.losses(f"loss-{ranks}", groups[0], summary.hooks),
    }
