"""What `error.py` found, as a page (error.md) and a plot (error.svg)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

# -- the page --------------------------------------------------------------------------------------------------------

HEADER = ("codec", "bits", "1-shot vNMSE", "per tensor", "2-shot vNMSE", "per tensor", "NMSE", "goal")
PAGE = """# What codecs lose of real gradients

Made by `benchmarks/error.py`, which says how.

{about}

`bits` and `per tensor` are over the tensors that are encoded, `vNMSE` is over all. `NMSE` is one encoding of one
worker's gradient, over the tensors that no codec leaves exact.

{hooked}

{goals}

{gradients}

![Bits against error](error.svg)

## Normal values, against theory

The best 2^bits levels for normal values (Lloyd-Max) against ours, with blocks of 256 so that the scale is known well.
The goal is to be within {within}. A ratio just under 1 is no mistake: theory has one scale, a block has its own.

{normal}
"""


def page(texts: Mapping[str, str], rows: Iterable[Sequence[str]], normal: Iterable[Sequence[str]]) -> str:
    """error.md, of the texts that are not the same every time and the cells of its two tables."""
    return PAGE.format(
        **texts,
        gradients=table(HEADER, rows),
        normal=table(("codec", "NMSE", "Lloyd-Max", "ratio", "goal"), normal),
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, aligned for those who read it as text: words to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<", *">" * (len(header) - 2), "<"]
    texts = [[f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)] for line in lines]
    rule = ["-" * (width - 1) + (":" if side == ">" else "-") for side, width in zip(sides, widths, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [texts[0], rule, *texts[1:]])


# -- the plot --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 90, 30, 56, 70
MAX_BITS, DECADES = 17, 10
STYLES = {
    "variant": ("#b9bec7", 3.5, "gradwire, other codebooks and rotations"),
    "emulated": ("#d9722e", 5.5, "others, emulated"),
    "default": ("#2563c9", 5.5, "gradwire, defaults"),
}
"""Colour, radius and legend by kind, in the order they are drawn."""
FONT = 13
Box = tuple[float, float, float, float]
Point = tuple[str, str, float, float]


def x_of(bits: float) -> float:
    """Pixels from the left."""
    return LEFT + bits / MAX_BITS * (WIDTH - LEFT - RIGHT)


def y_of(error: float) -> float:
    """Pixels from the top; the axis is logarithmic."""
    return TOP - math.log10(error) / DECADES * (HEIGHT - TOP - BOTTOM)


def plot(points: Sequence[Point]) -> str:
    """Bits against NMSE as an SVG, with the rate-distortion limit drawn in. A point is (name, kind, bits, error)."""
    shown = [point for kind in STYLES for point in points if point[1] == kind]
    marks = [
        f'<circle cx="{x_of(bits):.1f}" cy="{y_of(error):.1f}" r="{STYLES[kind][1]}" fill="{STYLES[kind][0]}">'
        f"<title>{escape(name)}: {bits:.2f} bits, NMSE {error:.2e}</title></circle>"
        for name, kind, bits, error in shown
    ]
    style = f'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="{FONT}" fill="#1f2937"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fcfcfd"/>'
    return "\n".join([head, back, *axes(), *limit(), *marks, *labels(shown), *legend(), "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    """A straight line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def axes() -> list[str]:
    """Grid, ticks and titles."""
    low, right, parts = y_of(10.0**-DECADES), WIDTH - RIGHT, []
    for bits in range(MAX_BITS + 1):
        parts.append(stroke(x_of(bits), TOP, x_of(bits), low, "#e8eaee"))
        parts.append(text(x_of(bits), low + 20, str(bits), "middle"))
    for decade in range(DECADES + 1):
        y = y_of(10.0**-decade)
        parts += [
            stroke(LEFT, y, right, y, "#e8eaee"),
            text(LEFT - 10, y + 4, f"1e-{decade}" if decade else "1", "end"),
        ]
    parts += [stroke(LEFT, TOP, LEFT, low, "#6b7280"), stroke(LEFT, low, right, low, "#6b7280")]
    parts.append(text((LEFT + right) / 2, HEIGHT - 22, "on the wire, scales included (bits a value)", "middle"))
    middle = (TOP + low) / 2
    turned = f'transform="rotate(-90 24 {middle:.1f})"'
    return [*parts, text(24, middle, "error of one encoding (NMSE: |error|^2 / |gradient|^2)", "middle", turned)]


def limit() -> list[str]:
    """2**(-2 bits), as far as the axes go, and what it is."""
    end = min(MAX_BITS, DECADES / math.log10(4))
    words = ("least possible for normal values", "of one variance: 2^(-2 bits)")
    at = x_of(8.6), y_of(4**-9.6)
    notes = [text(at[0], at[1] + 17 * i, line, "end", 'fill="#a11d33"') for i, line in enumerate(words)]
    return [stroke(x_of(0), y_of(1), x_of(end), y_of(4**-end), "#a11d33", 1.6), *notes]


def legend() -> list[str]:
    """What the colours mean, in one line above the plot."""
    parts, x = [], LEFT + 6.0
    for colour, radius, words in reversed(STYLES.values()):
        parts += [f'<circle cx="{x:.1f}" cy="26" r="{radius}" fill="{colour}"/>', text(x + 12, 30, words)]
        x += 44 + 7.6 * len(words)
    return parts


def labels(points: Sequence[Point]) -> list[str]:
    """Names beside their points, each at the first place where it covers no point, line or other name."""
    taken = [around(x_of(bits), y_of(error), 6) for _, _, bits, error in points]
    taken += [around(x_of(i / 20), y_of(4 ** -(i / 20)), 3) for i in range(20 * MAX_BITS)]
    parts = []
    for name, kind, bits, error in reversed(points):  # gradwire's own choose first
        if kind != "variant":
            x, y, box = place(x_of(bits), y_of(error), 7.9 * len(name), taken)
            taken.append(box)
            parts.append(text(x, y, name))
    return parts


def place(x: float, y: float, width: float, taken: Sequence[Box]) -> tuple[float, float, Box]:
    """Where words beside (x, y) start, and the box they fill. The first place is used if none is free."""
    sides = [(x + 10, y + 5 + dy) for dy in (0, 4, -4)]
    sides += [(x - 10 - width, y + 5), (x - width / 2, y - 11), (x - width / 2, y + 21)]
    sides += [(at, y + 5 + dy) for dy in (-14, 14, -24, 24, -34, 34) for at in (x + 8, x - 8 - width)]
    boxes = [(at, base - FONT + 2, at + width, base + 3) for at, base in sides]
    free = [i for i, box in enumerate(boxes) if box[0] > LEFT and not any(overlap(box, other) for other in taken)]
    best = free[0] if free else 0
    return *sides[best], boxes[best]


def around(x: float, y: float, radius: float) -> Box:
    """The square about a point: left, top, right, bottom."""
    return x - radius, y - radius, x + radius, y + radius


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share any area."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
