"""Step 1 of a report: runs -> groups of rows. A group is what compares: the same link, the same ranks."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from gradwire.tools.records.jsonl import RecordsError
from gradwire.tools.records.records import NO_LINK, Origin, Record, Run, Settings, Split


@dataclass(frozen=True, slots=True)
class Row:
    """One hook in one group, its repeats taken together."""

    hook: str
    record: Record
    """Steps of all repeats; bytes and error are their medians, the loss is their mean."""
    split: Split | None
    losses: tuple[float, ...]
    """Of every step, mean over the repeats."""
    repeats: int
    loss_range: tuple[float, float]
    """Lowest and highest final loss of a repeat."""
    began: frozenset[str]
    """When its repeats were measured. Hooks that took turns have the same."""

    @property
    def bits(self) -> float:
        """Sent per step, rank and parameter."""
        return 8 * self.record.sent_bytes / self.record.params

    @property
    def nmse(self) -> float:
        """Energy of the error by energy of the gradient: what theory bounds."""
        return self.record.gradient_error**2


@dataclass(frozen=True, slots=True)
class Group:
    """All hooks on one link between so many ranks."""

    link: str
    bits_per_s: float | None
    ranks: int
    rows: tuple[Row, ...]

    def row(self, hook: str) -> Row | None:
        """The row of a hook."""
        return next((row for row in self.rows if row.hook == hook), None)

    @property
    def exact(self) -> Row | None:
        """What a hook has to beat."""
        return self.row("exact")

    @property
    def noop(self) -> Row | None:
        """What no hook can beat."""
        return self.row("noop")

    @property
    def ceiling(self) -> float | None:
        """The largest speed-up over exact that any hook could reach."""
        return self.speed_up(self.noop) if self.noop else None

    def speed_up(self, row: Row) -> float | None:
        """Against exact."""
        return self.exact.record.median_s / row.record.median_s if self.exact else None

    def bits_per_value(self, row: Row) -> float:
        """Bits a value is coded with: at any number of ranks, coding once each way sends 2 (ranks - 1) / ranks times
        as much."""
        return row.bits * self.ranks / (2 * (self.ranks - 1))

    @property
    def latency(self) -> str:
        """As the link has it, `latency=5ms`; empty without."""
        return self.link.partition(",")[2]

    def at_latency(self, words: str) -> str:
        """Words about links of this latency."""
        return f"{words}, {self.latency}" if self.latency else words

    @property
    def name(self) -> str:
        """Link and ranks in words."""
        return f"{link_name(self.link)}, {self.ranks} ranks"


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a report shows."""

    groups: tuple[Group, ...]
    """By ranks, then from the fastest link to the slowest."""
    hooks: tuple[str, ...]
    """Of all groups, in the order they were measured."""
    origin: Origin
    settings: Settings
    """Of the first run."""
    params: int
    began: str
    """UTC, of the first run."""
    runs: int

    def by_ranks(self) -> list[tuple[int, list[Group]]]:
        """Groups that differ in the link alone."""
        return [(ranks, list(groups)) for ranks, groups in itertools.groupby(self.groups, lambda group: group.ranks)]


def summarise(runs: Sequence[Run]) -> Summary:
    """Put repeats together and order everything. RecordsError if there is nothing, or if the runs do not compare."""
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
    """In words."""
    return "no link limit" if link == NO_LINK else f"link {link}"


def by_latency(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that differ in the rate alone. A link without a limit is the fast end of all, whatever their latency."""
    free = [group for group in groups if group.link == NO_LINK]
    found: dict[str, list[Group]] = {}
    for group in groups:
        if group.link != NO_LINK:
            found.setdefault(group.latency, []).append(group)
    return [[*members, *free] for members in found.values()] or [free]


def _check_comparable(runs: Sequence[Run]) -> None:
    """All from one machine, and trained alike."""
    first = runs[0]
    for run in runs:
        ours, theirs = ({**asdict(each.shared), **asdict(each.origin)} for each in (first, run))
        different = [f"{key} {ours[key]} and {theirs[key]}" for key in ours if ours[key] != theirs[key]]
        if different:
            raise RecordsError(
                f"the records hold runs with {', '.join(different)}, which do not compare: report on one file for each"
            )


def _group(link: str, ranks: int, hooks: Sequence[str], runs: Sequence[Run]) -> Group:
    found = [(hook, [run for run in runs if run.cell.hook == hook]) for hook in hooks]
    rows = tuple(_row(hook, members) for hook, members in found if members)
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
    mean = {
        name: statistics.fmean(getattr(split, name) for split in known)
        for name in ("compute_s", "encode_s", "wire_s", "decode_s", "wait_s")
    }
    return Split(**mean)
