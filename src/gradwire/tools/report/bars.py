"""Charts made of bars: the headroom, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradwire.tools.records.table import label, ms
from gradwire.tools.report.markup import Markup, join, tag
from gradwire.tools.report.summary import Group, Row
from gradwire.tools.report.svg import LINE, WIDTH, Scale, chart, line, linear, steps, text

BAR, WORK, GAP = 14.0, 6.0, 12.0
"""Heights: of a step, of the exchange's work under it, and of the room below."""
PARTS = (("compute", "compute"), ("wait", "wait for the exchange"))
BESIDE = (("encode", "encode"), ("wire", "wire"), ("decode", "decode"))


def headroom(key: str, name: str, exact_s: float, noop_s: float) -> Markup:
    """The step with the exact exchange over the step with none: what is between them is all a hook can win."""
    scale = linear(0, max(exact_s, noop_s), 0, WIDTH)
    words = f"exact {ms(exact_s)} ms, noop {ms(noop_s)} ms a step"
    bars = (("exact: everything is sent", exact_s), ("noop: nothing is sent", noop_s))
    marks = [_named_bar(*bar, index * (LINE + BAR + GAP), scale) for index, bar in enumerate(bars)]
    lost = max(exact_s - noop_s, 0.0)
    x = scale(noop_s)
    room = tag(
        "rect", tag("title", f"exposed communication, {ms(lost)} ms"),
        x=x, y=LINE + 4, width=max(scale(exact_s) - x, 0.0), height=BAR, class_="c-wait",
    )  # fmt: skip
    y = 2 * (LINE + BAR + GAP) + 6
    share = lost / exact_s
    said = text(0, y, f"exposed communication: {ms(lost)} ms, {share:.0%} of a step", class_="label strong")
    return chart(key, f"Headroom, {name}", f"Step time: {words}.", y + 8, *marks, room, said)


def _named_bar(name: str, step_s: float, top: float, scale: Scale) -> Markup:
    return join(
        text(0, top + LINE - 3, name),
        text(WIDTH, top + LINE - 3, f"{ms(step_s)} ms", anchor="end"),
        tag("rect", x=0, y=top + LINE + 4, width=scale(step_s), height=BAR, class_="c-compute"),
    )


def stack(key: str, group: Group) -> Markup:
    """A bar a hook, compute and wait; under it, thinner, the exchange's own work, which runs beside both."""
    rows = [row for row in group.rows if row.split is not None]
    high = max((_extent(row) for row in rows), default=0.0)
    if not high:
        return join()
    scale = linear(0, high, 0, WIDTH)
    pitch = LINE + BAR + WORK + GAP + 4
    bottom = pitch * len(rows)
    grid = _grid(high, scale, bottom)
    marks = [join(*_stacked(row, index * pitch, scale)) for index, row in enumerate(rows)]
    words = "; ".join(f"{row.hook}: {_parts_text(row)}" for row in rows)
    return chart(key, f"Where a step's time goes, {group.name}", f"{words}.", bottom + LINE + 6, grid, *marks)


def speed_ups(key: str, group: Group) -> Markup:
    """A bar a hook, from the fastest, with a line where a hook begins to pay: for one link."""
    found = [(row, ratio) for row in group.rows if row.hook != "exact" and (ratio := group.speed_up(row)) is not None]
    if not found:
        return join()
    found.sort(key=lambda pair: -pair[1])
    scale, pitch = linear(0, max(1.1, found[0][1]), 0, WIDTH), LINE + BAR + GAP
    bottom = pitch * len(found)
    marks = [_ratio_bar(row, ratio, index * pitch, scale) for index, (row, ratio) in enumerate(found)]
    even = [line(scale(1), 0, scale(1), bottom, "even"), text(scale(1), bottom + LINE, "1x", anchor="middle")]
    words = ", ".join(f"{row.hook} {ratio:.2f}x" for row, ratio in found)
    return chart(key, f"Speed-up over exact, {group.name}", f"{words}.", bottom + LINE + 6, *marks, *even)


def _ratio_bar(row: Row, ratio: float, top: float, scale: Scale) -> Markup:
    name = f"{label(row.hook)}{'' if row.record.averages else ': nothing is sent'}"
    kind = "compute" if not row.record.averages else "decode" if ratio > 1 else "wait"
    return join(
        text(0, top + LINE - 3, name, class_="label strong"),
        text(WIDTH, top + LINE - 3, f"{ratio:.2f}x", anchor="end"),
        tag("rect", x=0, y=top + LINE + 2, width=scale(ratio), height=BAR, class_=f"c-{kind}"),
    )


def _extent(row: Row) -> float:
    split = row.split
    assert split is not None
    return max(
        split.compute_s + split.wait_s, split.encode_s + split.wire_s + split.decode_s, row.record.quartiles_s[1]
    )


def _stacked(row: Row, top: float, scale: Scale) -> Iterator[Markup]:
    yield text(0, top + LINE - 3, label(row.hook), class_="label strong")
    yield text(WIDTH, top + LINE - 3, f"{ms(row.record.median_s)} ms", anchor="end")
    yield from _pieces(row, PARTS, top + LINE + 2, BAR, scale)
    low, high = map(scale, row.record.quartiles_s)
    middle = top + LINE + 2 + BAR / 2
    yield join(line(low, middle, high, middle, "whisker"), line(low, middle - 3, low, middle + 3, "whisker"))
    yield line(high, middle - 3, high, middle + 3, "whisker")
    yield from _pieces(row, BESIDE, top + LINE + 3 + BAR, WORK, scale)


def _pieces(row: Row, parts: Sequence[tuple[str, str]], y: float, height: float, scale: Scale) -> Iterator[Markup]:
    x = 0.0
    for part, words in parts:
        seconds = getattr(row.split, f"{part}_s")
        width = scale(seconds)
        title = tag("title", f"{row.hook}: {words} {ms(seconds)} ms")
        yield tag("rect", title, x=x, y=y, width=width, height=height, class_=f"c-{part}")
        x += width


def _parts_text(row: Row) -> str:
    return ", ".join(f"{part} {ms(getattr(row.split, f'{part}_s'))} ms" for part, _ in (*PARTS, *BESIDE))


def _grid(high: float, scale: Scale, bottom: float) -> Markup:
    marks = []
    for value in steps(1e3 * high):
        x = scale(value / 1e3)
        anchor = "start" if value == 0 else "end" if x > WIDTH - 20 else "middle"
        marks += [line(x, 4, x, bottom, "grid"), text(x, bottom + LINE, f"{value:g}", class_="tick", anchor=anchor)]
    return join(*marks)


def legend() -> Markup:
    """The colours of the stack."""
    items = [tag("li", tag("i", class_=f"b-{part}"), words) for part, words in (*PARTS, *BESIDE)]
    return tag("ul", *items, class_="legend")
