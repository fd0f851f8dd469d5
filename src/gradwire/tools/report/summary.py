"""Runs -> groups of comparable rows (`summarise`), and the link rates between which a hook begins to pay."""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from gradwire.tools.records.jsonl import RecordsError
from gradwire.tools.records.records import NO_LINK, Origin, Record, Run, Settings, Split, differences


@dataclass(frozen=True, slots=True)
class Row:
    """One hook in one group, with its repeats taken together."""

    hook: str
    record: Record
    """The steps of all repeats. Bytes and error are medians over the repeats, the loss is their mean."""
    split: Split | None
    losses: tuple[float, ...]
    """Training loss of every step, mean over the repeats."""
    repeats: int
    loss_range: tuple[float, float]
    """Lowest and highest final loss of a repeat."""
    began: frozenset[str]
    """When the repeats were measured. Hooks that took turns have the same times."""

    @property
    def nmse(self) -> float:
        """Energy of the error divided by the energy of the gradient, which is what theory bounds."""
        return self.record.gradient_error**2


@dataclass(frozen=True, slots=True)
class Group:
    """All hooks on one link and number of ranks."""

    link: str
    bits_per_s: float | None
    ranks: int
    rows: tuple[Row, ...]

    def row(self, hook: str) -> Row | None:
        """The row of a hook, or None if it was not measured."""
        return next((row for row in self.rows if row.hook == hook), None)

    @property
    def exact(self) -> Row | None:
        """The baseline, which a hook has to beat."""
        return self.row("exact")

    @property
    def noop(self) -> Row | None:
        """The row without communication, which no hook can beat."""
        return self.row("noop")

    @property
    def ceiling(self) -> float | None:
        """The largest speed-up over exact that any hook could reach."""
        return self.speed_up(self.noop) if self.noop else None

    def speed_up(self, row: Row) -> float | None:
        """How many times as fast as exact, or None if exact was not measured."""
        return self.exact.record.median_s / row.record.median_s if self.exact else None

    def bits_per_value(self, row: Row) -> float:
        """Size of the code of one value. An exchange that sends each code once in both of its phases sends
        2 (ranks - 1) / ranks of them."""
        return 8 * row.record.sent_bytes / row.record.params * self.ranks / (2 * (self.ranks - 1))

    @property
    def latency(self) -> str:
        """As in the text of the link, `latency=5ms`; empty without."""
        return self.link.partition(",")[2]

    def at_latency(self, words: str) -> str:
        """Add the latency to words about links."""
        return f"{words}, {self.latency}" if self.latency else words

    @property
    def name(self) -> str:
        """Link and ranks in words."""
        return f"{link_name(self.link)}, {self.ranks} ranks"


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of a report."""

    groups: tuple[Group, ...]
    """By number of ranks, then from the fastest link to the slowest."""
    hooks: tuple[str, ...]
    """The hooks of all groups in the order they were measured."""
    origin: Origin
    settings: Settings
    """Of the first run."""
    params: int
    began: str
    """Start of the first run, UTC."""
    runs: int

    def by_ranks(self) -> list[tuple[int, list[Group]]]:
        """Groups that differ only in the link, for each number of ranks."""
        return [(ranks, list(groups)) for ranks, groups in itertools.groupby(self.groups, lambda group: group.ranks)]


def summarise(runs: Sequence[Run]) -> Summary:
    """Take repeats together and order everything.

    Args:
        runs: Those of one file.

    Returns:
        A group for each link and number of ranks, with one row per hook.

    Raises:
        RecordsError: There is no run, or the runs are not comparable.

    Examples:
        >>> summary = gradwire.report.summarise(gradwire.report.read(Path("records.jsonl")).runs)
    """
    if not runs:
        raise RecordsError("there is no record to report on; `gradwire bench --out records.jsonl` makes some")
    _check_comparable(runs)
    hooks = tuple(dict.fromkeys(run.cell.hook for run in runs))
    places: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        places.setdefault((run.cell.ranks, run.cell.link), []).append(run)
    groups = [_group(link, ranks, hooks, members) for (ranks, link), members in places.items()]
    return Summary(
        groups=tuple(sorted(groups, key=lambda group: (group.ranks, -(group.bits_per_s or math.inf), group.link))),
        hooks=hooks,
        origin=runs[0].origin,
        settings=runs[0].settings,
        params=runs[0].record.params,
        began=min(run.began for run in runs),
        runs=len(runs),
    )


def link_name(link: str) -> str:
    """The link in words."""
    return "no link limit" if link == NO_LINK else f"link {link}"


def rate_text(bits_per_s: float) -> str:
    """The rate of a link with three digits and a unit."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_s >= factor:
            return f"{bits_per_s / factor:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kbit/s"


def by_latency(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that differ only in the rate of the link, for each latency. An unlimited link is the fast end of all."""
    unlimited = [group for group in groups if group.link == NO_LINK]
    limited: dict[str, list[Group]] = {}
    for group in groups:
        if group.link != NO_LINK:
            limited.setdefault(group.latency, []).append(group)
    return [[*members, *unlimited] for members in limited.values()] or [unlimited]


def _check_comparable(runs: Sequence[Run]) -> None:
    for run in runs:
        if different := differences(runs[0].conditions, run.conditions):
            raise RecordsError(
                f"the records hold runs that differ in {', '.join(different)} and so are not comparable: use one file "
                "for each"
            )


def _group(link: str, ranks: int, hooks: Sequence[str], runs: Sequence[Run]) -> Group:
    by_hook = [(hook, [run for run in runs if run.cell.hook == hook]) for hook in hooks]
    rows = tuple(_row(hook, members) for hook, members in by_hook if members)
    return Group(link, runs[0].link_bits_per_s, ranks, rows)


def _row(hook: str, runs: Sequence[Run]) -> Row:
    records = [run.record for run in runs]
    losses = [record.loss for record in records]
    pooled = replace(
        records[0],
        step_s=tuple(itertools.chain.from_iterable(record.step_s for record in records)),
        sent_bytes=statistics.median(record.sent_bytes for record in records),
        gradient_error=statistics.median(record.gradient_error for record in records),
        loss=statistics.fmean(losses),
        identical=all(record.identical for record in records),
        kept_promises=all(record.kept_promises for record in records),
        verified=next((record.verified for record in records if not record.kept_promises), records[0].verified),
    )
    curve = tuple(map(statistics.fmean, zip(*(run.losses for run in runs), strict=False)))
    split, began = _split([run.split for run in runs]), frozenset(run.began for run in runs)
    return Row(hook, pooled, split, curve, len(runs), (min(losses), max(losses)), began)


def _split(splits: Sequence[Split | None]) -> Split | None:
    known = [split for split in splits if split is not None]
    if not known:
        return None
    names = [part.name for part in fields(Split)]
    return Split(**{name: statistics.fmean(getattr(split, name) for split in known) for name in names})


@dataclass(frozen=True, slots=True)
class Crossover:
    """A link rate at which the speed-up of a hook over exact passes 1."""

    hook: str
    bits_per_s: float
    pays_below: bool
    """Whether the hook is faster than exact below this rate. If not, it is above."""


def crossovers(groups: Sequence[Group], hook: str) -> list[Crossover]:
    """Interpolated between measured rates, linearly on logarithmic scales. `groups` differ only in the link."""
    result = []
    for (slow, low), (fast, high) in itertools.pairwise(_points(groups, hook)):
        if slow < fast and (low - 1) * (high - 1) < 0:
            part = math.log(low) / (math.log(low) - math.log(high))
            rate = math.exp(math.log(slow) + part * (math.log(fast) - math.log(slow)))
            result.append(Crossover(hook, rate, low > 1))
    return result


def crossover_texts(groups: Sequence[Group]) -> list[str]:
    """Where hooks are faster than exact: one sentence for all hooks of which it is true. Empty for a single rate."""
    if len({group.bits_per_s for group in groups}) < 2:
        return []
    alike: dict[str, list[str]] = {}
    for row in groups[0].rows:
        if row.record.averages and row.hook != "exact":
            for where in _where_faster(groups, row.hook):
                alike.setdefault(where, []).append(row.hook)
    place = groups[0].at_latency(f"{groups[0].ranks} ranks")
    return [f"{', '.join(hooks)} ({place}): {where}" for where, hooks in alike.items()]


def _where_faster(groups: Sequence[Group], hook: str) -> Iterator[str]:
    crossed = crossovers(groups, hook)
    for crossover in crossed:
        side = "below" if crossover.pays_below else "above"
        yield f"faster than exact {side} about {rate_text(crossover.bits_per_s)} (interpolated)"
    if crossed:
        return
    ratios = [ratio for group in groups if (ratio := _speed_up(group, hook)) is not None]
    limited = _points(groups, hook)
    if all(ratio > 1 for ratio in ratios):
        yield "faster than exact at every rate measured"
    elif all(ratio <= 1 for ratio in ratios):
        yield "slower than exact at every rate measured"
    elif limited and len(ratios) > len(limited) and limited[-1][1] > 1:
        yield f"faster than exact up to {rate_text(limited[-1][0])}, but not without a limit"
    else:
        yield "faster than exact only without a limit"


def _points(groups: Sequence[Group], hook: str) -> list[tuple[float, float]]:
    """(rate, speed-up) for every limited link, from the slowest."""
    pairs = [(group.bits_per_s, _speed_up(group, hook)) for group in groups]
    return sorted((rate, ratio) for rate, ratio in pairs if rate is not None and ratio is not None)


def _speed_up(group: Group, hook: str) -> float | None:
    row = group.row(hook)
    return None if row is None else group.speed_up(row)
