"""What the charts share: the frame with its words for screen readers, scales, ticks, and labels that keep apart.

Charts are drawn 400 units wide, which is about a phone; on wide screens they stand side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from gradwire.tools.report.markup import Markup, join, tag

WIDTH = 400.0
LINE = 15.0
"""Height of a line of text."""
CHAR = 7.2
"""Width of a character, a little generous."""
COLOURS = 8
"""Classes h0, h1, ... of the style sheet; a second round of hooks has the same colours, dashed."""

Scale = Callable[[float], float]
Box = tuple[float, float, float, float]


def chart(key: str, title: str, description: str, height: float, *marks: str) -> Markup:
    """A picture with a name and what it shows in words."""
    return tag(
        "svg",
        tag("title", title, id=f"{key}-title"),
        tag("desc", description, id=f"{key}-desc"),
        *marks,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        class_="chart",
        id=key,
    )


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """low -> start, high -> end."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """The same on the logarithm; what is not above 0 is drawn at `low`."""
    inner = linear(math.log(low), math.log(high), start, end)
    return lambda value: inner(math.log(max(value, low)))


def steps(high: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to about `high`."""
    raw = high / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * index for index in range(int(high / step + 1e-9) + 1)]


def ladder(low: float, high: float, rungs: Sequence[float] = (1, 2, 5)) -> list[float]:
    """Round numbers between two, for a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = (rung * 10.0**power for power, rung in itertools.product(powers, rungs))
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def text(x: float, y: float, words: str, *, class_: str = "label", anchor: str = "start") -> Markup:
    """One line of text."""
    return tag("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def polyline(points: Iterable[tuple[float, float]], class_: str, title: str = "") -> Markup:
    """A bent one, named when the pointer rests on it."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return tag("polyline", *([tag("title", title)] if title else []), points=path, class_=class_)


def dot(x: float, y: float, class_: str, title: str, radius: float = 3.5) -> Markup:
    """A point, named when the pointer rests on it."""
    return tag("circle", tag("title", title), cx=x, cy=y, r=radius, class_=class_)


def height(names: int, top: float) -> float:
    """Where a chart ends that begins at `top` and has so many names at its side."""
    return top + max(200.0, LINE * (names - 1))


def fit(words: str, room: float) -> str:
    """Cut to the room there is."""
    most = int(room / CHAR)
    return words if len(words) <= most else f"{words[: most - 1]}…"


def colour(hook: str, hooks: Sequence[str]) -> str:
    """The classes of a hook: the baselines have their own, the others take turns."""
    if hook in ("exact", "noop"):
        return f"hook-{hook}"
    place = [name for name in hooks if name not in ("exact", "noop")].index(hook)
    return f"h{place % COLOURS}" + (" dashed" if place >= COLOURS else "")


def end_labels(
    x: float, ends: Sequence[tuple[float, str, str]], low: float, high: float, *, left: bool = False
) -> Markup:
    """Names at the ends of lines, (y, name, class) each, pushed apart; a thin line leads to one that was moved."""
    way, anchor = (-1, "end") if left else (1, "start")
    ordered = sorted(ends)
    places = _apart([y for y, _, _ in ordered], low, high)
    marks = []
    for (y, name, class_), place in zip(ordered, places, strict=True):
        marks.append(polyline([(x + way, y), (x + 7 * way, place), (x + 12 * way, place)], f"lead {class_}"))
        marks.append(text(x + 15 * way, place + 4, name, anchor=anchor))
    return join(*marks)


def _apart(places: Sequence[float], low: float, high: float) -> list[float]:
    """Rising numbers moved as little as it takes to be a line apart, within [low, high] if they fit."""
    gap = min(LINE, (high - low) / max(len(places) - 1, 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, low, moved[-1] + gap if moved else -math.inf))
    ceiling = high
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def free_place(x: float, y: float, words: str, taken: list[Box], within: Box) -> tuple[float, float]:
    """Where to write next to a point so that nothing is covered; remembers it in `taken`."""
    width = CHAR * len(words)
    shifts = sorted(
        itertools.product((7.0, -7.0 - width, -width / 2), range(-60, 61, 5)), key=lambda s: _reach(s[0], s[1], width)
    )
    for dx, dy in shifts:
        box = (x + dx, y + dy - 8, x + dx + width, y + dy + 5)
        inside = within[0] <= box[0] and within[1] <= box[1] and box[2] <= within[2] and box[3] <= within[3]
        if inside and not any(_overlap(box, other) for other in taken):
            break
    taken.append(box)
    return box[0], box[1] + 11


def _reach(dx: float, dy: float, width: float) -> float:
    return abs(dy) + abs(dx + width / 2 if dx < 0 else dx) / 10


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
