"""The charts of a report. Each function returns None if there is nothing to draw."""

import math
from collections.abc import Iterator, Sequence

from gradwire.tools.records.table import label, ms
from gradwire.tools.report.summary import Group, Row, crossovers, link_name, rate_text
from gradwire.tools.report.svg import (
    LINE,
    WIDTH,
    Box,
    Chart,
    Mark,
    Scale,
    colour,
    dot,
    end_labels,
    fit,
    free_place,
    ladder,
    line,
    linear,
    logarithmic,
    polyline,
    rect,
    steps,
    text,
    ticks_x,
    ticks_y,
)

TOP = 12.0
BAR, WORK, GAP = 14.0, 6.0, 12.0
"""Heights of the bar of a step, of the bar of the exchange's work under it, and of the space below."""
STEP_PARTS = {"compute": "compute", "wait": "wait for the exchange"}
WORK_PARTS = {"encode": "encode", "wire": "wire", "decode": "decode"}
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095, 5: 0.0025}
"""Bits per value -> error of the best quantizer of single Gaussian values."""
BITS_SHOWN = (1 / 32, 20.0)
"""Hooks outside of this range, such as exact, would push all the others together."""


def headroom(key: str, name: str, exact_s: float, noop_s: float) -> Chart:
    """The step with the exact exchange above the step without communication. No hook can gain more than the rest."""
    scale = linear(0, max(exact_s, noop_s), 0, WIDTH)
    exposed_s, end = max(exact_s - noop_s, 0.0), 2 * (LINE + BAR + GAP) + 6
    marks = [
        *_bar(0, "exact: everything is sent", f"{ms(exact_s)} ms", scale(exact_s), "compute"),
        *_bar(LINE + BAR + GAP, "noop: nothing is sent", f"{ms(noop_s)} ms", scale(noop_s), "compute"),
        rect(scale(noop_s), LINE + 2, scale(exposed_s), BAR, "c-wait", f"exposed communication, {ms(exposed_s)} ms"),
        text(0, end, f"exposed communication: {ms(exposed_s)} ms, {exposed_s / exact_s:.0%} of a step", "label strong"),
    ]
    words = f"Step time: {ms(exact_s)} ms with exact, {ms(noop_s)} ms with noop."
    return Chart(key, f"Headroom, {name}", words, end + 8, marks)


def _bar(top: float, name: str, value: str, width: float, part: str, style: str = "label") -> list[Mark]:
    """A bar below its name and value."""
    return [*_names(top, name, value, style), rect(0, top + LINE + 2, width, BAR, f"c-{part}")]


def _names(top: float, name: str, value: str, style: str = "label strong") -> list[Mark]:
    return [text(0, top + LINE - 3, name, style), text(WIDTH, top + LINE - 3, value, anchor="end")]


def stack(key: str, group: Group) -> Chart | None:
    """For each hook a bar of compute and wait, and below it a thin one of the exchange's work, which overlaps both."""
    rows = [row for row in group.rows if row.split is not None]
    high = max(map(_extent, rows), default=0.0)
    if not high:
        return None
    scale, pitch = linear(0, high, 0, WIDTH), LINE + BAR + WORK + GAP + 4
    bottom = pitch * len(rows)
    marks = []
    for value in steps(1e3 * high):
        x = scale(value / 1e3)
        anchor = "start" if value == 0 else "end" if x > WIDTH - 20 else "middle"
        marks += [line(x, 4, x, bottom, "grid"), text(x, bottom + LINE, f"{value:g}", "tick", anchor)]
    for index, row in enumerate(rows):
        marks += _stacked(row, index * pitch, scale)
    words = "; ".join(f"{row.hook}: {_parts_text(row)}" for row in rows)
    return Chart(key, f"Where the time of a step goes, {group.name}", f"{words}.", bottom + LINE + 6, marks)


def _extent(row: Row) -> float:
    """The longest of what is drawn for a row."""
    step_s, work_s = (sum(_part_s(row, part) for part in parts) for parts in (STEP_PARTS, WORK_PARTS))
    return max(step_s, work_s, row.record.quartiles_s[1])


def _part_s(row: Row, part: str) -> float:
    return float(getattr(row.split, f"{part}_s"))


def _parts_text(row: Row) -> str:
    return ", ".join(f"{part} {ms(_part_s(row, part))} ms" for part in (*STEP_PARTS, *WORK_PARTS))


def _stacked(row: Row, top: float, scale: Scale) -> Iterator[Mark]:
    yield from _names(top, label(row.hook), f"{ms(row.record.median_s)} ms")
    yield from _pieces(row, STEP_PARTS, top + LINE + 2, BAR, scale)
    low, high = map(scale, row.record.quartiles_s)
    y = top + LINE + 2 + BAR / 2
    yield line(low, y, high, y, "whisker")
    yield line(low, y - 3, low, y + 3, "whisker")
    yield line(high, y - 3, high, y + 3, "whisker")
    yield from _pieces(row, WORK_PARTS, top + LINE + 3 + BAR, WORK, scale)


def _pieces(row: Row, parts: dict[str, str], y: float, height: float, scale: Scale) -> Iterator[Mark]:
    x = 0.0
    for part, words in parts.items():
        width = scale(_part_s(row, part))
        yield rect(x, y, width, height, f"c-{part}", f"{row.hook}: {words} {ms(_part_s(row, part))} ms")
        x += width


def speed_up_bars(key: str, group: Group) -> Chart | None:
    """For a single link: a bar for each hook, from the fastest, and a line at 1x."""
    pairs = [(row, ratio) for row in group.rows if row.hook != "exact" and (ratio := group.speed_up(row)) is not None]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: -pair[1])
    scale, pitch = linear(0, max(1.1, pairs[0][1]), 0, WIDTH), LINE + BAR + GAP
    bottom = pitch * len(pairs)
    marks = []
    for index, (row, ratio) in enumerate(pairs):
        name = label(row.hook) + ("" if row.record.averages else ": nothing is sent")
        part = "compute" if not row.record.averages else "decode" if ratio > 1 else "wait"
        marks += _bar(index * pitch, name, f"{ratio:.2f}x", scale(ratio), part, "label strong")
    marks += [line(scale(1), 0, scale(1), bottom, "even"), text(scale(1), bottom + LINE, "1x", anchor="middle")]
    words = ", ".join(f"{row.hook} {ratio:.2f}x" for row, ratio in pairs)
    return Chart(key, f"Speed-up over exact, {group.name}", f"{words}.", bottom + LINE + 6, marks)


class RateAxis:
    """Where links stand: by their rate on a logarithmic scale, and the link without a limit at the far right."""

    LEFT, RIGHT = 116.0, 360.0
    """Names stand to the left, where the link is slow and hooks differ most."""
    NO_LIMIT = 84.0
    """Room for the link without a limit."""

    def __init__(self, groups: Sequence[Group]) -> None:
        rates = [group.bits_per_s for group in groups if group.bits_per_s is not None]
        unlimited = len(rates) < len(groups)
        first, last = self.LEFT + 6, self.RIGHT - (self.NO_LIMIT if unlimited else 30)
        several = len(set(rates)) > 1
        self.of_rate: Scale = logarithmic(min(rates), max(rates), first, last) if several else lambda rate: first
        self._unlimited = self.RIGHT - 16 if rates else first

    def __call__(self, group: Group) -> float:
        """The horizontal place of a group."""
        return self._unlimited if group.bits_per_s is None else self.of_rate(group.bits_per_s)


def speed_up_lines(key: str, groups: Sequence[Group], hooks: Sequence[str]) -> Chart | None:
    """The speed-up of every hook over the rate of the link, with rings at crossovers; `groups` differ in the link."""
    compared = [group for group in groups if group.exact is not None]
    shown = [hook for hook in hooks if hook != "exact" and any(group.row(hook) for group in compared)]
    ratios = [ratio for group in compared for row in group.rows if (ratio := group.speed_up(row)) is not None]
    if not ratios or not shown:
        return None
    low, high, bottom = min(*ratios, 0.9), max(*ratios, 1.1), _bottom(len(shown))
    x, y = RateAxis(groups), logarithmic(low / 1.03, high * 1.03, bottom, TOP)
    marks, ends = _speed_up_axes(groups, x, y, low, high, bottom), []
    for hook in shown:
        spots = _spots(hook, groups, x, y)
        marks += _speed_up_line(hook, spots, groups, colour(hook, hooks), x, y)
        ends.append((spots[0][1], fit(label(hook), x.LEFT - 12), colour(hook, hooks)))
    marks += end_labels(x.LEFT + 6, ends, TOP, bottom, left=True)
    title = groups[0].at_latency(f"Speed-up over exact against link rate, {groups[0].ranks} ranks")
    return Chart(key, title, _speed_up_text(groups), bottom + 2 * LINE + 6, marks)


def _bottom(names: int) -> float:
    """Where a chart ends that has this many names at its side."""
    return TOP + max(200.0, LINE * (names - 1))


def _spots(hook: str, groups: Sequence[Group], x: RateAxis, y: Scale) -> list[tuple[float, float, str]]:
    """Place and tip of every measured speed-up of a hook, from the slowest link."""
    pairs = [(group, group.speed_up(row)) for group in groups if (row := group.row(hook)) is not None]
    tip = "{}, {}: {:.2f}x"
    return sorted(
        (x(group), y(ratio), tip.format(label(hook), link_name(group.link), ratio))
        for group, ratio in pairs
        if ratio is not None
    )


def _speed_up_line(
    hook: str, spots: Sequence[tuple[float, float, str]], groups: Sequence[Group], style: str, x: RateAxis, y: Scale
) -> Iterator[Mark]:
    yield polyline([(at, up) for at, up, _ in spots], f"line {style}", label(hook))
    for at, up, tip in spots:
        yield dot(at, up, 2.5, f"dot {style}", tip)
    for crossover in crossovers(groups, hook):
        tip = f"{hook} crosses exact at about {rate_text(crossover.bits_per_s)}"
        yield dot(x.of_rate(crossover.bits_per_s), y(1.0), 5, "ring", tip)


def _speed_up_axes(
    groups: Sequence[Group], x: RateAxis, y: Scale, low: float, high: float, bottom: float
) -> list[Mark]:
    rates = {x(group): "no limit" if group.bits_per_s is None else rate_text(group.bits_per_s) for group in groups}
    fine = tuple(1 + step / 10 for step in range(90))
    digits = fine if high / low < 1.8 else (1, 1.5, 2, 3, 5, 7) if high / low < 12 else (1, 2, 5)
    ratios = [(y(value), f"{value:.2g}x") for value in ladder(low, high, digits) if abs(value - 1) > 1e-6]
    return [
        line(x.LEFT, bottom, x.RIGHT, bottom, "axis"),
        *ticks_x(rates.items(), TOP, bottom, groups[0].at_latency("link rate")),
        *ticks_y(ratios, x.LEFT, x.RIGHT, at_right=True),
        line(x.LEFT, y(1.0), x.RIGHT, y(1.0), "even"),
        text(x.RIGHT + 4, y(1.0) + 4, "1x"),
    ]


def _speed_up_text(groups: Sequence[Group]) -> str:
    parts = []
    for group in groups:
        ratios = {row.hook: group.speed_up(row) for row in group.rows if row.hook != "exact"}
        words = ", ".join(f"{hook} {ratio:.2f}x" for hook, ratio in ratios.items() if ratio is not None)
        parts.append(f"{link_name(group.link)}: {words or 'exact was not measured, so there is nothing to compare'}")
    return "; ".join(parts) + "."


def rate_distortion(bits: float) -> float:
    """The smallest error (energy by energy) of any code of Gaussian values with `bits` per value."""
    return float(2 ** (-2 * bits))


def bits_and_error(key: str, group: Group, hooks: Sequence[str]) -> Chart | None:
    """Bits per value against the error of the mean, for every hook with an error, and what theory allows."""
    averaging = [(group.bits_per_value(row), row) for row in group.rows if row.record.averages and row.nmse > 0]
    pairs = [(bits, row) for bits, row in averaging if BITS_SHOWN[0] < bits < BITS_SHOWN[1]]
    if not pairs:
        return None
    low, high = min(0.5, *(bits for bits, _ in pairs)) / 1.3, max(5.0, *(bits for bits, _ in pairs)) * 1.5
    floor, left, bottom = min(row.nmse for _, row in pairs) / 10, 40.0, 272.0
    x, y = logarithmic(low, high, left, WIDTH - 4), logarithmic(floor, 2.0, bottom, TOP)
    best = {rate: value for rate, value in LLOYD_MAX.items() if value > floor}
    marks = [*_error_axes(low, high, floor, x, y, left, bottom), *_theory(low, high, floor, best, x, y)]
    spots = [(x(bits), y(row.nmse)) for bits, row in pairs] + [(x(rate), y(value)) for rate, value in best.items()]
    taken: list[Box] = [(at - 5, up - 5, at + 5, up + 5) for at, up in spots]
    for (at, up), (bits, row) in zip(spots, pairs, strict=False):
        tip = f"{label(row.hook)}: {bits:.2f} bits per value, error {row.nmse:.1e}"
        place = free_place(at, up, label(row.hook), taken, (left, TOP - 8, WIDTH, bottom))
        marks += [dot(at, up, 4, f"dot {colour(row.hook, hooks)}", tip), text(*place, label(row.hook), "label halo")]
    words = ", ".join(f"{row.hook} {bits:.2f} bits, error {row.nmse:.1e}" for bits, row in pairs)
    return Chart(key, f"Bits against error, {group.ranks} ranks", f"{words}.", bottom + 2 * LINE + 6, marks)


def _theory(low: float, high: float, floor: float, best: dict[int, float], x: Scale, y: Scale) -> Iterator[Mark]:
    rates = [low * (high / low) ** (index / 80) for index in range(81)]
    curve = [(x(rate), y(rate_distortion(rate))) for rate in rates if rate_distortion(rate) >= floor]
    yield polyline(curve, "limit", "rate-distortion limit for Gaussian values, 2^-2R")
    for rate, value in best.items():
        at, up = x(rate), y(value)
        yield dot(at, up, 6, "hit", f"Lloyd-Max, {rate} bits: {value}")
        yield line(at - 3, up - 3, at + 3, up + 3, "cross")
        yield line(at - 3, up + 3, at + 3, up - 3, "cross")


def _error_axes(
    low: float, high: float, floor: float, x: Scale, y: Scale, left: float, bottom: float
) -> Iterator[Mark]:
    decades = range(math.ceil(math.log10(floor)), 1)[::-1]
    yield line(left, bottom, WIDTH, bottom, "axis")
    bits = [2.0**power for power in range(-5, 6) if low <= 2.0**power <= high]
    yield from ticks_x(((x(value), f"{value:g}") for value in bits), TOP, bottom, "bits per value")
    errors = ((y(10.0**power), f"1e{power}" if power else "1") for power in decades[:: 1 + len(decades) // 10])
    yield from ticks_y(errors, left, WIDTH)


def losses(key: str, group: Group, hooks: Sequence[str]) -> Chart | None:
    """Training loss of every hook, step by step."""
    rows = [row for row in group.rows if any(map(math.isfinite, row.losses))]
    values = [value for row in rows for value in row.losses if math.isfinite(value)]
    if not values:
        return None
    left, right, bottom, longest = 30.0, 300.0, _bottom(len(rows)), max(len(row.losses) for row in rows)
    x, y = linear(1, longest, left, right), logarithmic(min(values) * 0.99, max(values) * 1.01, bottom, TOP)
    digits = (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8)
    levels = ladder(min(values), max(values), digits) or [min(values), max(values)]
    marks = [line(left, bottom, right, bottom, "axis"), *ticks_y(((y(v), f"{v:.3g}") for v in levels), left, right)]
    shown = sorted({1, max(1, round(longest / 2)), longest})
    marks += ticks_x(((x(step), str(step)) for step in shown), TOP, bottom, "step")
    ends = []
    for row in rows:
        path = [(x(step), y(value)) for step, value in enumerate(row.losses, start=1) if math.isfinite(value)]
        style = colour(row.hook, hooks)
        marks.append(polyline(path, f"line thin {style}", f"{label(row.hook)}: {row.losses[-1]:.3f} at the end"))
        ends.append((path[-1][1], fit(label(row.hook), WIDTH - right - 15), style))
    marks += end_labels(right, ends, TOP, bottom)
    words = ", ".join(f"{row.hook} from {row.losses[0]:.3f} to {row.losses[-1]:.3f}" for row in rows)
    return Chart(key, f"Training loss, nats per byte, {group.ranks} ranks", f"{words}.", bottom + 2 * LINE + 6, marks)
