"""Bits against error, with what theory allows drawn in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradwire.tools.records.table import label
from gradwire.tools.report.markup import Markup, join
from gradwire.tools.report.summary import Group, Row
from gradwire.tools.report.svg import (
    LINE,
    WIDTH,
    Box,
    Scale,
    chart,
    colour,
    dot,
    free_place,
    line,
    logarithmic,
    polyline,
    text,
)

LEFT, TOP, BOTTOM = 40.0, 12.0, 272.0
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095, 5: 0.0025}
"""Bits -> error of the best quantizer of single Gaussian values."""
MOST_BITS = 20.0
"""What sends more, exact that is, would push all the others together."""
LEAST_BITS = 1 / 32


def limit(bits: float) -> float:
    """Rate-distortion: no code of Gaussian values at `bits` each has a smaller error (energy by energy)."""
    return float(2 ** (-2 * bits))


def error(key: str, group: Group, hooks: Sequence[str]) -> Markup:
    """Every hook that loses something: bits a value is coded with, against the error of the mean."""
    rows = [row for row in group.rows if row.record.averages and LEAST_BITS < group.bits_per_value(row) < MOST_BITS]
    rows = [row for row in rows if row.nmse > 0]
    if not rows:
        return join()
    bits = [group.bits_per_value(row) for row in rows]
    low, high = min(*bits, 0.5, 1.0) / 1.3, max(*bits, 5.0) * 1.5
    floor = min(row.nmse for row in rows) / 10
    x, y = logarithmic(low, high, LEFT, WIDTH - 4), logarithmic(floor, 2.0, BOTTOM, TOP)
    marks = [_axes(low, high, floor, x, y), _limits(low, high, floor, x, y)]
    taken: list[Box] = [_around(x(group.bits_per_value(row)), y(row.nmse)) for row in rows]
    taken += [_around(x(rate), y(value)) for rate, value in LLOYD_MAX.items() if value > floor]
    for row in rows:
        marks += _point(row, group, hooks, x, y, taken)
    words = ", ".join(f"{row.hook} {group.bits_per_value(row):.2f} bits, error {row.nmse:.1e}" for row in rows)
    return chart(key, f"Bits against error, {group.ranks} ranks", f"{words}.", BOTTOM + 2 * LINE + 6, *marks)


def _point(row: Row, group: Group, hooks: Sequence[str], x: Scale, y: Scale, taken: list[Box]) -> list[Markup]:
    bits = group.bits_per_value(row)
    place = x(bits), y(row.nmse)
    words = free_place(*place, label(row.hook), taken, (LEFT, TOP - 8, WIDTH, BOTTOM))
    title = f"{label(row.hook)}: {bits:.2f} bits a value, error {row.nmse:.1e}"
    style = colour(row.hook, hooks)
    return [dot(*place, f"dot {style}", title, 4), text(*words, label(row.hook), class_="label halo")]


def _limits(low: float, high: float, floor: float, x: Scale, y: Scale) -> Markup:
    rates = [low * (high / low) ** (index / 80) for index in range(81)]
    curve = [(x(rate), y(limit(rate))) for rate in rates if limit(rate) >= floor]
    marks = [polyline(curve, "limit", "rate-distortion limit for Gaussian values, 2^-2R")]
    marks += [
        _cross(x(rate), y(value), f"Lloyd-Max, {rate} bits: {value}")
        for rate, value in LLOYD_MAX.items()
        if value > floor
    ]
    return join(*marks)


def _cross(x: float, y: float, title: str) -> Markup:
    return join(
        dot(x, y, "hit", title, 6), line(x - 3, y - 3, x + 3, y + 3, "cross"), line(x - 3, y + 3, x + 3, y - 3, "cross")
    )


def _axes(low: float, high: float, floor: float, x: Scale, y: Scale) -> Markup:
    marks = [line(LEFT, BOTTOM, WIDTH, BOTTOM, "axis")]
    for power in range(-5, 6):
        if low <= 2.0**power <= high:
            at = x(2.0**power)
            marks.append(line(at, TOP, at, BOTTOM, "grid"))
            marks.append(text(at, BOTTOM + LINE, f"{2.0**power:g}", class_="tick", anchor="middle"))
    decades = range(math.ceil(math.log10(floor)), 1)
    for power in decades[:: 1 + len(decades) // 10]:
        at = y(10.0**power)
        marks.append(line(LEFT, at, WIDTH, at, "grid"))
        marks.append(text(LEFT - 4, at + 4, "1" if power == 0 else f"1e{power}", class_="tick", anchor="end"))
    marks.append(text(WIDTH / 2, BOTTOM + 2 * LINE, "bits a value", class_="tick", anchor="middle"))
    return join(*marks)


def _around(x: float, y: float) -> Box:
    return x - 5, y - 5, x + 5, y + 5
