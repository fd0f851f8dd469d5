"""Loss against steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradwire.tools.records.table import label
from gradwire.tools.report.markup import Markup, join
from gradwire.tools.report.summary import Group
from gradwire.tools.report.svg import (
    LINE,
    WIDTH,
    Scale,
    chart,
    colour,
    end_labels,
    fit,
    height,
    ladder,
    line,
    linear,
    logarithmic,
    polyline,
    text,
)

LEFT, RIGHT, TOP = 30.0, 300.0, 12.0
RUNGS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8)


def losses(key: str, group: Group, hooks: Sequence[str]) -> Markup:
    """Training loss of every hook, step by step."""
    rows = [row for row in group.rows if any(map(math.isfinite, row.losses))]
    values = [value for row in rows for value in row.losses if math.isfinite(value)]
    if not values:
        return join()
    bottom, longest = height(len(rows), TOP), max(len(row.losses) for row in rows)
    x, y = linear(1, longest, LEFT, RIGHT), logarithmic(min(values) * 0.99, max(values) * 1.01, bottom, TOP)
    marks, ends = [_axes(longest, min(values), max(values), x, y, bottom)], []
    for row in rows:
        path = [(x(step), y(value)) for step, value in enumerate(row.losses, start=1) if math.isfinite(value)]
        style = colour(row.hook, hooks)
        marks.append(polyline(path, f"line thin {style}", f"{label(row.hook)}: {row.losses[-1]:.3f} at the end"))
        ends.append((path[-1][1], fit(label(row.hook), WIDTH - RIGHT - 15), style))
    marks.append(end_labels(RIGHT, ends, TOP, bottom))
    words = ", ".join(f"{row.hook} from {row.losses[0]:.3f} to {row.losses[-1]:.3f}" for row in rows)
    return chart(key, f"Training loss, nats per byte, {group.ranks} ranks", f"{words}.", bottom + 2 * LINE + 6, *marks)


def _axes(longest: int, low: float, high: float, x: Scale, y: Scale, bottom: float) -> Markup:
    marks = [line(LEFT, bottom, RIGHT, bottom, "axis")]
    for value in ladder(low, high, RUNGS) or [low, high]:
        marks.append(line(LEFT, y(value), RIGHT, y(value), "grid"))
        marks.append(text(LEFT - 4, y(value) + 4, f"{value:.3g}", class_="tick", anchor="end"))
    for step in sorted({1, max(1, round(longest / 2)), longest}):
        marks.append(text(x(step), bottom + LINE, str(step), class_="tick", anchor="middle"))
    return join(*marks, text((LEFT + RIGHT) / 2, bottom + 2 * LINE, "step", class_="tick", anchor="middle"))
