"""Make the pictures of the documentation: `python scripts/docs_pictures.py` writes docs/pictures/*.svg.

Pictures of measurements read the tables in benchmarks/results. All are 420 units wide, so that their text can be read
on a phone, and have a white background, so that they can be read on dark pages. A test checks that they are current.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 420
INK, SOFT, RULE = "#1f2937", "#6b7280", "#d1d5db"
BLUE, GREEN, ORANGE, GREY, RED, YELLOW = "#4f6bd8", "#2f9e6e", "#d97b29", "#9aa3b2", "#c2413b", "#f3e3b3"
PALE = {BLUE: "#e3e8fb", GREEN: "#dcf2e8", ORANGE: "#fbe9d8", GREY: "#eef0f3", RED: "#f8dfdd"}
Box = tuple[float, float, float, float]
"""Left, top, width, height."""


# -- what pictures are made of -----------------------------------------------------------------------------------------


def picture(height: float, title: str, parts: Iterable[str]) -> str:
    """An SVG with a title for those who cannot see it."""
    arrow = (
        '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{SOFT}"/></marker>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH * 1.4:g}" '
        f'height="{height * 1.4:g}" role="img" font-family="system-ui, sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height:g}" rx="6" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<defs>{arrow}</defs>", ground, *parts, "</svg>", ""])


def text(
    x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK, size: float = 12, bold: bool = False
) -> str:
    """One line."""
    weight = ' font-weight="600"' if bold else ""
    style = f'fill="{fill}" font-size="{size:g}" text-anchor="{anchor}"{weight}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def bar(box: Box, fill: str, stroke: str = "none", dash: str = "") -> str:
    """A rectangle."""
    x, y, width, height = box
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="4" fill="{fill}" stroke="{stroke}"{dashed}/>'


def label(box: Box, *lines: str, colour: str = GREY, size: float = 12) -> str:
    """A box with lines of text in its middle."""
    x, y, width, height = box
    top = y + height / 2 - (len(lines) - 1) * 7.5 + 4
    words = [text(x + width / 2, top + 15 * i, line, anchor="middle", size=size) for i, line in enumerate(lines)]
    return "\n".join([bar(box, PALE[colour], colour), *words])


def arrow(*points: tuple[float, float], dash: str = "") -> str:
    """A line through points with a head at its end."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    style = f'fill="none" stroke="{SOFT}" stroke-width="1.4"{dashed} marker-end="url(#arrow)"'
    return f'<polyline points="{path}" {style}/>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = RULE, width: float = 1) -> str:
    """A straight line."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="{width:g}"/>'


def table(page: str, section: str) -> list[list[str]]:
    """The cells of the first table after a heading, without markup."""
    rest = (RESULTS / page).read_text().split(f"## {section}\n", 1)[1].splitlines()
    first = next(index for index, row in enumerate(rest) if row.startswith("|"))
    rows = itertools.takewhile(lambda row: row.startswith("|"), rest[first:])
    cells = [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if not set("".join(row)) <= set("-: ")]


# -- pictures of measurements ------------------------------------------------------------------------------------------

SHOWN = {
    "plain DDP": ("plain DDP", GREY),
    "torch fp16": ("torch's fp16 hook", GREY),
    "bf16": ("bf16", BLUE),
    "int8": ("int8", BLUE),
    "int4": ("int4", BLUE),
    "powersgd:rank=4": ("powersgd:rank=4", ORANGE),
    "noop": ("no communication", GREEN),
}
LINKS = {"2 hosts, 100 Mbit/s": "100 Mbit/s", "2 hosts, 1 Gbit/s": "1 Gbit/s", "2 hosts, 10 Gbit/s": "10 Gbit/s"}


def step_time() -> str:
    """Step time per link and hook: one panel per link, each with a scale of its own."""
    head, *rows = table("step_time.md", "All hooks")
    parts, y = [text(12, 22, "Time of one training step in ms, 2 hosts", bold=True)], 36.0
    for name, link in LINKS.items():
        values = dict(zip(head, next(row for row in rows if row[0] == name), strict=True))
        longest = max(float(values[hook]) for hook in SHOWN)
        parts.append(text(12, y + 14, link, bold=True, fill=SOFT))
        y += 22
        for hook, (words, colour) in SHOWN.items():
            ms = float(values[hook])
            parts += [text(124, y + 11, words, anchor="end"), bar((130, y, 235 * ms / longest, 14), colour)]
            parts.append(text(134 + 235 * ms / longest, y + 11, f"{ms:.0f}", fill=SOFT))
            y += 18
        y += 8
    return picture(y + 6, "Step times of plain DDP and of hooks on three links", parts)


VERDICTS = {"hurts": RED, "cannot tell": GREY, "no harm seen": GREEN, "reference": GREY}


def harm() -> str:
    """The gap of every hook of the comparison under AdamW, with its interval."""
    head, *rows = table("evidence.md", "Byte-level GPT, 0.5 M parameters, AdamW")
    found = [dict(zip(head, row, strict=True)) for row in rows if row[-1] != "reference"]
    low, high, left, right = -0.08, 0.52, 132.0, 405.0

    def place(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * (right - left)

    parts = [text(12, 22, "Held-out loss minus that of exact averaging", bold=True)]
    parts.append(text(12, 40, "500 steps, 3 seeds, with 95% intervals", fill=SOFT))
    bottom = 56 + 20 * len(found)
    for tick in (0, 0.1, 0.2, 0.3, 0.4, 0.5):
        parts.append(line(place(tick), 50, place(tick), bottom, INK if tick == 0 else RULE))
        parts.append(text(place(tick), bottom + 14, f"{tick:+.1f}" if tick else "0", anchor="middle", fill=SOFT))
    for index, row in enumerate(found):
        y, gap, half = 64 + 20 * index, float(row["gap"]), float(row["95% interval"].removeprefix("+-"))
        colour = VERDICTS[row["verdict"]]
        parts.append(text(126, y + 4, row["hook"], anchor="end"))
        parts.append(line(place(gap - half), y, place(gap + half), y, colour, 3))
        parts.append(f'<circle cx="{place(gap):.1f}" cy="{y}" r="4.5" fill="{colour}"/>')
    x = 12.0
    for verdict in ("no harm seen", "cannot tell", "hurts"):
        parts += [bar((x, bottom + 26, 10, 10), VERDICTS[verdict]), text(x + 15, bottom + 35, verdict, fill=SOFT)]
        x += 110
    return picture(bottom + 46, "The harm of each hook in our own comparison", parts)


# -- diagrams ----------------------------------------------------------------------------------------------------------


def choose() -> str:
    """The flow chart of the page Choose a hook."""
    ask = [
        (("gradwire headroom train.py", "below 10% of a step?"), ("use no hook",), GREY),
        (("gradwire advise train.py", "is bf16 or int8 fast enough?"), ("bf16, else int8",), GREEN),
        (
            ("Fast network inside the node,", "slow one between the nodes?"),
            ("two_level(inside=", "exact, across=int8)"),
            BLUE,
        ),
        (
            ("A link below about 1 Gbit/s?", "compare first: these may hurt"),
            ("int4, int3; powersgd", "with rank 16 or more"),
            BLUE,
        ),
        (("Still too slow, with Adam?", "compare first"), ("int2:whiten=true", "or OneBitAdamW"), ORANGE),
    ]
    parts, y = [], 12.0
    for question, result, colour in ask:
        parts.append(label((12, y, 214, 44), *question))
        parts += [arrow((226, y + 22), (262, y + 22)), text(244, y + 17, "yes", anchor="middle", fill=SOFT, size=11)]
        parts.append(label((264, y, 146, 44), *result, colour=colour))
        parts += [arrow((119, y + 44), (119, y + 68)), text(126, y + 60, "no", fill=SOFT, size=11)]
        y += 70
    parts.append(label((12, y, 214, 44), "Average once in several steps:", "LocalSGD, then compare", colour=ORANGE))
    return picture(y + 56, "Flow chart: which hook to choose", parts)


def path() -> str:
    """A gradient on its way through one step."""
    steps = [
        ("backward", "DDP fills a bucket with gradients", GREY),
        ("cut", "a bucket becomes chunks of 4 MB", GREY),
        ("encode", "the codec makes bytes of values", BLUE),
        ("wire", "collectives send the bytes", ORANGE),
        ("decode", "bytes of all ranks become one mean", BLUE),
        ("optimizer", "steps with the mean, on every rank", GREY),
    ]
    parts, y = [text(12, 22, "One bucket", bold=True)], 34.0
    for index, (name, words, colour) in enumerate(steps):
        parts += [label((12, y, 96, 30), name, colour=colour), text(122, y + 19, words)]
        if index < len(steps) - 1:
            parts.append(arrow((60, y + 30), (60, y + 44)))
        y += 46
    y += 14
    parts.append(text(12, y, "Four chunks, side by side in time", bold=True))
    y += 12
    for chunk in range(4):
        x = 64.0 + 62 * chunk
        parts.append(text(12, y + 14, f"chunk {chunk}", fill=SOFT))
        for width, colour in ((60, BLUE), (60, ORANGE), (40, BLUE)):
            parts.append(bar((x, y, width - 2, 20), colour))
            x += width
        y += 24
    for x, words, colour in ((12, "encode, decode", BLUE), (140, "on the wire", ORANGE)):
        parts += [bar((x, y + 4, 10, 10), colour), text(x + 15, y + 13, words, fill=SOFT)]
    return picture(y + 26, "The path of a gradient: backward, cut, encode, wire, decode, optimizer", parts)


def lanes() -> str:
    """Why each collective of a job has a lane."""
    parts, y = [], 0.0
    for rank, late in enumerate((0, 22)):
        parts.append(text(12, y + 22, f"rank {rank}", bold=True))
        for lane in range(2):
            top = y + 32 + 34 * lane
            parts += [text(12, top + 17, f"lane {lane}", fill=SOFT), line(60, top + 26, 410, top + 26)]
            for ticket in range(3):
                box = (62.0 + (80 + late / 2) * ticket + 88 * lane + late / 2, top, 74.0, 24.0)
                parts.append(label(box, f"ticket {ticket}", colour=(BLUE, ORANGE, GREEN)[ticket]))
        y += 108
    parts.append(text(12, y + 14, "Ranks differ in time, never in the order on a lane.", fill=SOFT))
    return picture(y + 26, "Two ranks with two lanes: tickets have the same order on each lane", parts)


def buckets() -> str:
    """What small buckets hide."""
    parts = [text(12, 22, "Large buckets", bold=True), text(12, 118, "Small buckets", bold=True)]
    for top, sends in ((32, [(150, 180)]), (128, [(95, 66), (163, 66), (231, 66)])):
        parts += [text(12, top + 15, "backward", fill=SOFT), bar((76, top, 152, 22), GREY)]
        parts.append(text(12, top + 45, "wire", fill=SOFT))
        for x, width in sends:
            x = 230 if len(sends) == 1 else x
            parts.append(bar((x, top + 30, width, 22), ORANGE))
    parts += [line(228, 28, 228, 190, SOFT), text(232, 206, "end of the backward pass", fill=SOFT)]
    parts += [arrow((228, 98), (410, 98)), text(240, 112, "the optimizer waits", fill=SOFT)]
    parts.append(arrow((228, 186), (297, 186)))
    return picture(216, "Small buckets are sent while the backward pass runs", parts)


def residual() -> str:
    """Error feedback."""
    parts = [
        label((12, 20, 100, 40), "gradient", colour=GREY),
        arrow((112, 40), (150, 40)),
        label((152, 20, 46, 40), "+", colour=GREEN, size=18),
        arrow((198, 40), (236, 40)),
        label((238, 20, 70, 40), "encode", colour=BLUE),
        arrow((308, 40), (340, 40)),
        label((342, 20, 68, 40), "wire", colour=ORANGE),
        arrow((273, 60), (273, 100)),
        text(280, 84, "what encoding lost", fill=SOFT),
        label((206, 102, 134, 40), "residual, kept", "until the next step", colour=GREEN),
        arrow((206, 122), (175, 122), (175, 62)),
        text(12, 112, "added in the next step", fill=SOFT),
    ]
    return picture(156, "Error feedback: what encoding loses is added to the next gradient", parts)


PICTURES: Sequence[Callable[[], str]] = (step_time, harm, choose, path, lanes, buckets, residual)


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for make in PICTURES:
        (FOLDER / f"{make.__name__}.svg").write_text(make())


if __name__ == "__main__":
    main()
