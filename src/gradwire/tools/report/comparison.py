"""The report of `gradwire compare`: as text, as markdown for a pull request, and as a page with charts."""

import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence

from gradwire.tools.records.table import markdown_table, text_table
from gradwire.tools.records.verdicts import FAILED, FINE, HURTS, SLIGHT, Comparison, Row, decimals
from gradwire.tools.report.page import render
from gradwire.tools.report.svg import (
    LINE,
    WIDTH,
    Chart,
    Mark,
    Scale,
    colour,
    dot,
    end_labels,
    fit,
    line,
    linear,
    mark,
    polyline,
    steps,
    text,
    ticks_x,
    ticks_y,
)

LEFT, RIGHT, TOP, BOTTOM = 44.0, 300.0, 12.0, 232.0
POINTS = 150
"""The most points of a line."""
Point = tuple[float, tuple[float, ...]]
"""A place on the horizontal axis, and the values of the seeds there."""
METHOD = (
    "Final: the mean over the last steps. Gap: final minus that of the reference with the same seed, averaged over the "
    "seeds, with the 95% interval of Student's t distribution. Visible gap: the smallest true gap that runs with this "
    "spread show as harm nine times out of ten."
)


def heading(result: Comparison) -> str:
    """What was run, in a sentence."""
    link = "" if result.link is None else f", on an emulated link of {result.link}"
    what = f"the last {result.metric} that it logged" if result.metric else f"the mean loss of the last {result.window}"
    seeds = f"{len(result.seeds)} seed{'' if len(result.seeds) == 1 else 's'}"
    return (
        f"{shlex.join(result.script)} was run with {seeds} on {result.ranks} ranks{link}. After {result.steps} steps "
        f"{what} counts."
    )


def first_text(result: Comparison) -> str:
    """Who reaches the target first."""
    first, reference = result.first, result.reference
    if first is None or first.reached_s is None:
        return f"No run reached a loss of {result.target:.4g}."
    when = f"{first.name} reaches a loss of {result.target:.4g} first, after {first.reached_s:.1f} s"
    if first is reference or reference.reached_s is None:
        return f"{when} ({first.reached} steps of {1e3 * first.step_s:.1f} ms)."
    return f"{when}; {reference.name} needs {reference.reached_s:.1f} s, {reference.reached_s / first.reached_s:.2f}x."


def spread_text(result: Comparison) -> str:
    """The spread between seeds, and what counts as small."""
    if math.isnan(result.spread):
        return "One seed shows no spread."
    return (
        f"Another seed changes the final value of {result.reference.name} by {result.spread:.2g} (standard deviation). "
        f"Gaps below {result.tolerance:.2g} count as small."
    )


def heads(result: Comparison) -> list[str]:
    """The columns."""
    return ["hook", "final", "gap", "95%", "visible gap", "ms/step", "MB/step", f"s to {result.target:.4g}"]


def cells(row: Row, result: Comparison) -> list[str]:
    """The values of the columns."""
    gap, digits = row.gap, decimals(result.tolerance)
    return [
        row.name,
        f"{statistics.fmean(row.finals.values()):.{digits}f}" if row.finals else "-",
        "-" if gap is None else f"{gap.mean:+.{digits}f}",
        "-" if gap is None else f"+-{gap.half_width:.{digits}f}",
        "-" if gap is None else f"{gap.visible:.{digits}f}",
        "-" if math.isnan(row.step_s) else f"{1e3 * row.step_s:.1f}",
        "-" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.3f}",
        "-" if row.reached_s is None else f"{row.reached_s:.1f}",
    ]


def to_text(result: Comparison) -> str:
    """A table, a sentence for every hook, and who is first."""
    head = heads(result)
    table = text_table([head, *(cells(row, result) for row in result.rows)], right=range(1, len(head)))
    width = max(len(row.name) for row in result.rows)
    sentences = [f"{row.name.ljust(width)}  {row.sentence}" for row in result.rows[1:]]
    last = [spread_text(result), first_text(result), result.recommendation()]
    return "\n".join([heading(result), "", table, "", *sentences, "", *last])


def to_markdown(result: Comparison) -> str:
    """The same for a pull request."""
    head = heads(result)
    table = markdown_table([head, *(cells(row, result) for row in result.rows)], right=range(1, len(head)))
    sentences = [f"- **{row.name}** {row.sentence}" for row in result.rows[1:]]
    parts = ["## gradwire: does it hurt?", "", heading(result), "", *sentences, "", table, ""]
    return "\n".join([*parts, METHOD, "", spread_text(result), first_text(result), result.recommendation()]) + "\n"


def to_html(result: Comparison) -> str:
    """The page."""
    return render(
        "compare.html.j2",
        choices=[],
        result=result,
        lead=heading(result),
        verdicts=[(row, _tone(row)) for row in result.rows[1:]],
        charts=_charts(result),
        heads=heads(result),
        rows=[(row, cells(row, result)) for row in result.rows],
        seed_heads=[f"seed {seed}" for seed in result.seeds],
        method=METHOD,
        spread=spread_text(result),
        first=f"{first_text(result)} {result.recommendation()}",
    )


def _charts(result: Comparison) -> list[tuple[str, str, Chart | None]]:
    """Title, hint and chart."""
    smooth = f"smoothed over {result.window} steps: the mean of the seeds, and their range"
    return [
        ("Loss over steps", f"The training loss, {smooth}.", losses(result)),
        ("Gap to the reference", f"Loss minus that of the reference with the same seed, {smooth}.", gaps(result)),
        ("Loss over seconds", "The same losses at each hook's median step time.", losses(result, over_seconds=True)),
        ("Gap at the end", "With the 95% interval. A ring marks the smallest visible gap.", forest(result)),
    ]


def _tone(row: Row) -> str:
    return {FINE: "go", SLIGHT: "go", HURTS: "bad", FAILED: "bad"}.get(row.verdict, "")


# -- charts ------------------------------------------------------------------------------------------------------------


def losses(result: Comparison, *, over_seconds: bool = False) -> Chart | None:
    """The loss of every hook, over steps or over seconds."""
    bands = {}
    for row in result.rows:
        each_s = row.step_s if over_seconds else 1.0
        points = [(at * each_s, values) for at, values in enumerate(zip(*row.curves.values(), strict=True), start=1)]
        if points and not math.isnan(each_s):
            bands[row.name] = _thin(points)
    axis = "seconds" if over_seconds else "step"
    return _lines(f"losses-{axis}", f"Training loss by {axis}", bands, _names(result), axis)


def gaps(result: Comparison) -> Chart | None:
    """The gap to the reference over steps, from the first whole window on."""
    bands = {}
    for row in result.rows[1:]:
        by_step = enumerate(zip(*row.gaps(result.reference), strict=True), start=1)
        if points := [(float(at), values) for at, values in by_step if at >= result.window]:
            bands[row.name] = _thin(points)
    return _lines("gaps", "Gap to the reference over steps", bands, _names(result), "step")


def _names(result: Comparison) -> list[str]:
    return [row.name for row in result.rows]


def _thin(points: list[Point]) -> list[Point]:
    """At most about POINTS of them, the last one too."""
    every = max(1, len(points) // POINTS)
    return [*points[::every], *([] if (len(points) - 1) % every == 0 else points[-1:])]


def _lines(key: str, title: str, bands: Mapping[str, list[Point]], names: Sequence[str], axis: str) -> Chart | None:
    """For every hook a line, the mean of the values at each place, within a band, their range."""
    if not bands:
        return None
    low, high = _range(bands.values())
    last = max(band[-1][0] for band in bands.values())
    x, y = linear(0, last, LEFT, RIGHT), linear(low, high, BOTTOM, TOP)
    marks = [line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")]
    marks += ticks_x(((x(value), f"{value:g}") for value in steps(last, 4)), TOP, BOTTOM, axis)
    marks += ticks_y(((y(value), f"{value:.4g}") for value in _levels(low, high)), LEFT, RIGHT)
    ends = []
    for name, band in bands.items():
        style, end = colour(name, names), statistics.fmean(band[-1][1])
        clipped = [(x(at), [y(min(max(value, low), high)) for value in values]) for at, values in band]
        marks += _band(clipped, style, f"{name}: {end:.4g} at the end")
        ends.append((statistics.fmean(clipped[-1][1]), fit(name, WIDTH - RIGHT - 15), style))
    marks += end_labels(RIGHT, ends, TOP, BOTTOM)
    words = ", ".join(f"{name}: {statistics.fmean(band[-1][1]):.4g} at the end" for name, band in bands.items())
    return Chart(key, title, f"{words}.", BOTTOM + 2 * LINE + 6, marks)


def _band(places: Sequence[tuple[float, Sequence[float]]], style: str, tip: str) -> list[Mark]:
    around = [(at, min(values)) for at, values in places] + [(at, max(values)) for at, values in places[::-1]]
    points = " ".join(f"{at:.1f},{up:.1f}" for at, up in around)
    mean = polyline([(at, statistics.fmean(values)) for at, values in places], f"line thin {style}", tip)
    return [mark("polygon", f"band {style}", points=points), mean]


def _range(bands: Iterable[Sequence[Point]]) -> tuple[float, float]:
    """The range of the values after the first tenth, where losses fall steeply. Others are drawn at the edge."""
    values = [value for band in bands for _, each in band[len(band) // 10 :] for value in each]
    low, high = min(values), max(values)
    margin = (high - low) * 0.03 or abs(high) * 0.01 or 1.0
    return low - margin, high + margin


def _levels(low: float, high: float) -> list[float]:
    """Round numbers between two."""
    distance = steps(high - low)[1]
    first = math.ceil(low / distance)
    return [distance * at for at in range(first, math.floor(high / distance) + 1)]


def forest(result: Comparison) -> Chart | None:
    """For every hook its gap with the interval, and the smallest visible gap."""
    rows = [row for row in result.rows if row.gap is not None and math.isfinite(row.gap.half_width)]
    if not rows:
        return None
    ends = [value for row in rows if row.gap is not None for value in (row.gap.low, row.gap.high, row.gap.visible)]
    low, high = min(0.0, *ends), max(0.0, *ends) or 1e-9
    x, pitch = linear(low, high, 8, WIDTH - 8), 2 * LINE + 6
    bottom = pitch * len(rows) + 4
    marks = [line(8, bottom, WIDTH - 8, bottom, "axis")]
    marks += ticks_x(((x(value), f"{value:.4g}") for value in _levels(low, high)), 4, bottom, "gap")
    marks.append(line(x(0), 4, x(0), bottom, "even"))
    for at, row in enumerate(rows):
        marks += _interval(row, at * pitch + 4, x, _names(result))
    words = "; ".join(f"{row.name}: {row.sentence}" for row in rows)
    return Chart("forest", "Gap at the end of the training", f"{words}.", bottom + 2 * LINE + 6, marks)


def _interval(row: Row, top: float, x: Scale, names: Sequence[str]) -> list[Mark]:
    assert row.gap is not None
    y, gap = top + LINE + 8, row.gap
    value = f"{gap.mean:+.4g} +- {gap.half_width:.3g}"
    return [
        text(8, top + LINE - 3, row.name, "label strong halo"),
        text(WIDTH - 8, top + LINE - 3, value, "label halo", anchor="end"),
        line(x(gap.low), y, x(gap.high), y, f"line {colour(row.name, names)}"),
        dot(x(gap.mean), y, 4, f"dot {colour(row.name, names)}", f"{row.name}: {value}"),
        dot(x(gap.visible), y, 4, "ring", f"{row.name}: smallest visible gap {gap.visible:.3g}"),
    ]
