"""Speed-up against the link's rate, with the rates at which hooks begin to pay."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.tools.records.table import label
from gradwire.tools.report.crossover import find, rate_text
from gradwire.tools.report.markup import Markup, join
from gradwire.tools.report.summary import Group, link_name
from gradwire.tools.report.svg import (
    LINE,
    WIDTH,
    Scale,
    chart,
    colour,
    dot,
    end_labels,
    fit,
    height,
    ladder,
    line,
    logarithmic,
    polyline,
    text,
)

LEFT, RIGHT, TOP = 116.0, 360.0, 12.0
"""The names stand to the left, where the link is slow and the hooks differ most."""
NO_LIMIT = 84.0
"""Room for the link without a limit, right of the rates."""


class Axis:
    """Where a link stands: by its rate, and the one without a limit at the far right."""

    def __init__(self, groups: Sequence[Group]) -> None:
        rates = [group.bits_per_s for group in groups if group.bits_per_s is not None]
        free = any(group.bits_per_s is None for group in groups)
        last = RIGHT - NO_LIMIT if free else RIGHT - 30
        several = len(set(rates)) > 1
        self.by_rate: Scale = logarithmic(min(rates), max(rates), LEFT + 6, last) if several else lambda rate: LEFT + 6
        self._unlimited = RIGHT - 16 if rates else LEFT + 6

    def __call__(self, group: Group) -> float:
        """Across the picture."""
        return self._unlimited if group.bits_per_s is None else self.by_rate(group.bits_per_s)


def speed_up(key: str, groups: Sequence[Group], hooks: Sequence[str]) -> Markup:
    """Every hook against exact, over the link's rate; `groups` differ in the link alone. Rings mark crossovers."""
    compared = [group for group in groups if group.exact is not None]
    shown = [hook for hook in hooks if hook != "exact" and any(group.row(hook) for group in compared)]
    ratios = [ratio for group in compared for row in group.rows if (ratio := group.speed_up(row)) is not None]
    if not ratios or not shown:
        return join()
    bottom = height(len(shown), TOP)
    low, high = min(*ratios, 0.9), max(*ratios, 1.1)
    x, y = Axis(groups), logarithmic(low / 1.03, high * 1.03, bottom, TOP)
    drawn = [_drawn(hook, groups, colour(hook, hooks), x, y) for hook in shown]
    names = end_labels(LEFT + 6, [end for _, end in drawn], TOP, bottom, left=True)
    title = groups[0].at_latency(f"Speed-up over exact against link rate, {groups[0].ranks} ranks")
    marks = [_rates(groups, x, bottom), _ratios(low, high, y), *(mark for mark, _ in drawn), names]
    return chart(key, title, _words(groups), bottom + 2 * LINE + 6, *marks)


def _drawn(hook: str, groups: Sequence[Group], style: str, x: Axis, y: Scale) -> tuple[Markup, tuple[float, str, str]]:
    """A hook's line, points and rings; and what is to stand at its left end."""
    found = [(group, group.speed_up(row)) for group in groups if (row := group.row(hook)) is not None]
    spots = sorted((x(group), y(ratio), ratio, group.link) for group, ratio in found if ratio is not None)
    marks = [polyline([(at, up) for at, up, _, _ in spots], f"line {style}", label(hook))]
    for at, up, ratio, link in spots:
        marks.append(dot(at, up, f"dot {style}", f"{label(hook)}, {link_name(link)}: {ratio:.2f}x", 2.5))
    for crossing in find(groups, hook):
        words = f"{hook} crosses exact at about {rate_text(crossing.bits_per_s)}"
        marks.append(dot(x.by_rate(crossing.bits_per_s), y(1.0), "ring", words, 5))
    return join(*marks), (spots[0][1], fit(label(hook), LEFT - 12), style)


def _rates(groups: Sequence[Group], x: Axis, bottom: float) -> Markup:
    marks = [line(LEFT, bottom, RIGHT, bottom, "axis")]
    for at in {x(group): group for group in groups}.items():
        name = "no limit" if at[1].bits_per_s is None else rate_text(at[1].bits_per_s)
        marks.append(line(at[0], TOP, at[0], bottom, "grid"))
        marks.append(text(at[0], bottom + LINE, name, class_="tick", anchor="middle"))
    name = groups[0].at_latency("link rate")
    return join(*marks, text((LEFT + RIGHT) / 2, bottom + 2 * LINE, name, class_="tick", anchor="middle"))


def _ratios(low: float, high: float, y: Scale) -> Markup:
    fine = tuple(1 + step / 10 for step in range(90))
    rungs = fine if high / low < 1.8 else (1, 1.5, 2, 3, 5, 7) if high / low < 12 else (1, 2, 5)
    marks = []
    for value in ladder(low, high, rungs):
        if abs(value - 1) > 1e-6:
            marks.append(line(LEFT, y(value), RIGHT, y(value), "grid"))
            marks.append(text(RIGHT + 4, y(value) + 4, f"{value:.2g}x", class_="tick"))
    return join(*marks, line(LEFT, y(1.0), RIGHT, y(1.0), "even"), text(WIDTH - 36, y(1.0) + 4, "1x"))


def _words(groups: Sequence[Group]) -> str:
    parts = []
    for group in groups:
        ratios = {row.hook: group.speed_up(row) for row in group.rows if row.hook != "exact"}
        told = ", ".join(f"{hook} {ratio:.2f}x" for hook, ratio in ratios.items() if ratio is not None)
        parts.append(f"{link_name(group.link)}: {told or 'without exact there is nothing to compare with'}")
    return "; ".join(parts) + "."
