"""Where a hook begins to pay: the link rate at which its speed-up over exact passes 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire.tools.report.summary import Group


@dataclass(frozen=True, slots=True)
class Crossover:
    """A hook pays on one side of a rate and not on the other."""

    hook: str
    bits_per_s: float
    pays_below: bool


def find(groups: Sequence[Group], hook: str) -> list[Crossover]:
    """Between measured rates, by a straight line on logarithmic scales. `groups` differ in the link alone."""
    found = []
    for (slow, low), (fast, high) in itertools.pairwise(points(groups, hook)):
        if slow < fast and (low - 1) * (high - 1) < 0:
            part = math.log(low) / (math.log(low) - math.log(high))
            rate = math.exp(math.log(slow) + part * (math.log(fast) - math.log(slow)))
            found.append(Crossover(hook, rate, low > 1))
    return found


def points(groups: Sequence[Group], hook: str) -> list[tuple[float, float]]:
    """(rate, speed-up) where the link has a rate, from the slowest."""
    pairs = [(group.bits_per_s, _speed_up(group, hook)) for group in groups]
    return sorted((rate, ratio) for rate, ratio in pairs if rate is not None and ratio is not None)


def crossovers(groups: Sequence[Group]) -> list[str]:
    """Where the hooks that average pay, a sentence for all that behave alike; empty with fewer than two rates."""
    if len({group.bits_per_s for group in groups}) < 2:
        return []
    alike: dict[str, list[str]] = {}
    for row in groups[0].rows:
        if row.record.averages and row.hook != "exact":
            for where in _where(groups, row.hook):
                alike.setdefault(where, []).append(row.hook)
    place = groups[0].at_latency(f"{groups[0].ranks} ranks")
    return [f"{', '.join(hooks)} ({place}): {where}" for where, hooks in alike.items()]


def _where(groups: Sequence[Group], hook: str) -> Iterator[str]:
    crossed = find(groups, hook)
    for crossover in crossed:
        side = "below" if crossover.pays_below else "above"
        yield f"faster than exact {side} about {rate_text(crossover.bits_per_s)} (interpolated)"
    if crossed:
        return
    ratios = [ratio for group in groups if (ratio := _speed_up(group, hook)) is not None]
    measured, unlimited = points(groups, hook), _unlimited(groups, hook)
    if all(ratio > 1 for ratio in ratios):
        yield "faster than exact at every rate measured"
    elif all(ratio <= 1 for ratio in ratios):
        yield "slower than exact at every rate measured"
    elif measured and unlimited is not None and measured[-1][1] > 1:
        yield f"faster than exact up to {rate_text(measured[-1][0])}, not without a limit"
    else:
        yield "faster than exact only without a limit"


def rate_text(bits_per_s: float) -> str:
    """With three digits and a unit."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_s >= factor:
            return f"{bits_per_s / factor:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kbit/s"


def _unlimited(groups: Sequence[Group], hook: str) -> float | None:
    free = [group for group in groups if group.bits_per_s is None]
    return _speed_up(free[0], hook) if free else None


def _speed_up(group: Group, hook: str) -> float | None:
    row = group.row(hook)
    return None if row is None else group.speed_up(row)
