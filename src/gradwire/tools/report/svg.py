"""What the charts share: marks, scales, ticks, and labels that do not overlap. Templates turn marks into SVG.

Charts are 400 units wide, about the width of a phone; on wide screens they stand side by side.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH = 400.0
LINE = 15.0
"""Height of a line of text."""
CHAR = 7.2
"""Upper estimate of the width of a character."""
COLOURS = 8
"""Classes h0, h1, ... of the style sheet. Further hooks have the same colours again, dashed."""

Scale = Callable[[float], float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One SVG element."""

    tag: str
    attributes: dict[str, str]
    words: str = ""
    """Text that is drawn."""
    tip: str = ""
    """Text that is shown while the pointer rests on the element."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture, with a title and a description for screen readers."""

    key: str
    """Its id on the page."""
    title: str
    description: str
    height: float
    marks: Sequence[Mark]


def mark(tag: str, style: str, words: str = "", tip: str = "", **attributes: float | str) -> Mark:
    """A mark of the class `style`, with numbers rounded to a tenth."""
    texts = {name: value if isinstance(value, str) else f"{round(value, 1):g}" for name, value in attributes.items()}
    return Mark(tag, {"class": style, **texts}, words, tip)


def text(x: float, y: float, words: str, style: str = "label", anchor: str = "start") -> Mark:
    """One line of text."""
    return mark("text", f"{style} {anchor}", words, x=x, y=y)


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Mark:
    """A straight line."""
    return mark("line", style, x1=x1, y1=y1, x2=x2, y2=y2)


def rect(x: float, y: float, width: float, height: float, style: str, tip: str = "") -> Mark:
    """A bar."""
    return mark("rect", style, tip=tip, x=x, y=y, width=max(width, 0.0), height=height)


def dot(x: float, y: float, radius: float, style: str, tip: str) -> Mark:
    """A circle."""
    return mark("circle", style, tip=tip, cx=x, cy=y, r=radius)


def polyline(points: Iterable[tuple[float, float]], style: str, tip: str = "") -> Mark:
    """A line through points."""
    return mark("polyline", style, tip=tip, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Maps low to start and high to end."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """The same on a logarithmic scale. Values below `low` are drawn at `low`."""
    inner = linear(math.log(low), math.log(high), start, end)
    return lambda value: inner(math.log(max(value, low)))


def steps(high: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to about `high`, for a linear axis."""
    raw = high / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * index for index in range(int(high / step + 1e-9) + 1)]


def ladder(low: float, high: float, digits: Sequence[float] = (1, 2, 5)) -> list[float]:
    """Round numbers between two, for a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = (digit * 10.0**power for power, digit in itertools.product(powers, digits))
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def ticks_x(places: Iterable[tuple[float, str]], top: float, bottom: float, name: str = "") -> list[Mark]:
    """Vertical grid lines with a text below each, and the name of the axis below them."""
    spots = list(places)
    marks = [line(x, top, x, bottom, "grid") for x, _ in spots]
    marks += [text(x, bottom + LINE, words, "tick", "middle") for x, words in spots]
    middle = (min(x for x, _ in spots) + max(x for x, _ in spots)) / 2
    return [*marks, text(middle, bottom + 2 * LINE, name, "tick", "middle")] if name else marks


def ticks_y(places: Iterable[tuple[float, str]], left: float, right: float, *, at_right: bool = False) -> list[Mark]:
    """Horizontal grid lines with a text at the left or right end of each."""
    marks = []
    for y, words in places:
        marks.append(line(left, y, right, y, "grid"))
        x, anchor = (right + 4, "start") if at_right else (left - 4, "end")
        marks.append(text(x, y + 4, words, "tick", anchor))
    return marks


def fit(words: str, room: float) -> str:
    """Words, cut to the room there is."""
    most = int(room / CHAR)
    return words if len(words) <= most else f"{words[: most - 1]}…"


def colour(hook: str, hooks: Sequence[str]) -> str:
    """The classes of a hook: the baselines have their own, the other hooks take turns."""
    if hook in ("exact", "noop"):
        return f"hook-{hook}"
    place = [name for name in hooks if name not in ("exact", "noop")].index(hook)
    return f"h{place % COLOURS}" + (" dashed" if place >= COLOURS else "")


def end_labels(
    x: float, ends: Sequence[tuple[float, str, str]], low: float, high: float, *, left: bool = False
) -> list[Mark]:
    """Names at the ends of lines, given as (y, name, style), moved apart; a thin line leads to each name."""
    way, anchor = (-1, "end") if left else (1, "start")
    ordered = sorted(ends)
    marks = []
    for (y, name, style), place in zip(ordered, _apart([y for y, _, _ in ordered], low, high), strict=True):
        marks.append(polyline([(x + way, y), (x + 7 * way, place), (x + 12 * way, place)], f"leader {style}"))
        marks.append(text(x + 15 * way, place + 4, name, anchor=anchor))
    return marks


def _apart(places: Sequence[float], low: float, high: float) -> list[float]:
    """Rising numbers, moved as little as needed to be one line of text apart, within [low, high] if they fit."""
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
    """Where to write next to a point without covering anything in `taken`, to which the place is added."""
    width = CHAR * len(words)
    shifts = itertools.product((7.0, -7.0 - width, -width / 2), range(-60, 61, 5))
    for dx, dy in sorted(shifts, key=lambda shift: _distance(shift[0], shift[1], width)):
        box = (x + dx, y + dy - 8, x + dx + width, y + dy + 5)
        inside = within[0] <= box[0] and within[1] <= box[1] and box[2] <= within[2] and box[3] <= within[3]
        if inside and not any(_overlap(box, other) for other in taken):
            break
    taken.append(box)
    return box[0], box[1] + 11


def _distance(dx: float, dy: float, width: float) -> float:
    """How far a label is from its point. Vertical distance counts more."""
    return abs(dy) + abs(dx + width / 2 if dx < 0 else dx) / 10


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
