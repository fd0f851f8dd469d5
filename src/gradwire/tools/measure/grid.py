"""BenchGrid: hooks x links x ranks x repeats, measured cell by cell into a file that another call can continue."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradwire.errors import SpecError
from gradwire.exchanges import EXCHANGES, exchange
from gradwire.tools.launch.launch import Report, check_nproc, run_ranks
from gradwire.tools.launch.link import Link
from gradwire.tools.records.jsonl import Records, RecordsError, append, read
from gradwire.tools.records.records import (
    NO_LINK,
    PLAIN,
    Cell,
    Origin,
    Record,
    Run,
    Settings,
    Split,
    conditions,
    differences,
)

BASELINES = ("exact", "noop")
"""Always measured: the hook that the others must beat, and the one that sends nothing, which none can beat."""


@dataclass(frozen=True, kw_only=True)
class BenchGrid:
    """What to measure. Hooks and links are written canonically, each once, the baselines first."""

    hooks: Sequence[str] = ()
    """Specs, besides the baselines. If there are none: all registered hooks."""
    links: Sequence[str] = (NO_LINK,)
    ranks: Sequence[int] = (2,)
    repeats: int = 1
    settings: Settings = field(default_factory=Settings)
    """Settings of the first repeat; the seeds of the others follow. The number of ranks in it is not used."""

    def __post_init__(self) -> None:
        hooks = checked([*BASELINES, *(self.hooks or all_hooks())])
        links = list(dict.fromkeys(map(_link, self.links)))
        if self.repeats < 1:
            raise SpecError(f"repeats must be at least 1, got {self.repeats}")
        for ranks in self.ranks:
            if ranks < 2:
                raise SpecError(f"ranks must be at least 2, as one rank has nothing to exchange; got {ranks}")
            check_nproc(ranks)
        if PLAIN in hooks and links != [NO_LINK]:
            raise SpecError(f"{PLAIN} cannot run on an emulated link, which only hooks know of: measure 'exact' there")
        object.__setattr__(self, "hooks", hooks)
        object.__setattr__(self, "links", links)
        object.__setattr__(self, "ranks", list(dict.fromkeys(self.ranks)))

    def cells(self) -> list[Cell]:
        """Every cell, in the order they are measured."""
        places = itertools.product(range(self.repeats), self.ranks, self.links, self.hooks)
        return [Cell(*place) for place in places]


def all_hooks() -> list[str]:
    """Every registered hook, with its default options."""
    return list(EXCHANGES)


def checked(hooks: Sequence[str]) -> list[str]:
    """The hooks as canonical specs, each once. SpecError for one that does not exist."""
    return list(dict.fromkeys(hook if hook == PLAIN else str(exchange(hook)) for hook in hooks))


def _link(text: str) -> str:
    return NO_LINK if text == NO_LINK else str(Link.parse(text))


def measure(
    hooks: Sequence[str],
    settings: Settings | None = None,
    *,
    report: Report = lambda part, doing: None,
    prefixes: Sequence[Sequence[str]] = (),
    env: Mapping[str, str] | None = None,
) -> list[Record]:
    """Train under every hook (specs, or PLAIN) in turns on local processes, and return one record per hook.

    `report` is called with the part that is done and what is being done. `prefixes` and `env` place the ranks, for
    instance on hosts of their own: see `run_ranks`.
    """
    names, settings = checked(hooks), settings or Settings()
    if not names:
        raise SpecError(f"no hook to measure; available: {', '.join((PLAIN, *all_hooks()))}")
    results = _train(names, NO_LINK, settings, report, prefixes=prefixes, env=env)
    return [Record.from_dict(result["record"]) for result in results]


def run_group(grid: BenchGrid, cells: Sequence[Cell], settings: Settings, report: Report) -> list[Run]:
    """Measure cells of one link and number of ranks: all their hooks in one set of processes."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    results = _train([cell.hook for cell in cells], cells[0].link, settings, report)
    return [
        Run(
            cell=cell,
            repeats=grid.repeats,
            link_bits_per_s=None if cell.link == NO_LINK else Link.parse(cell.link).bits_per_s,
            settings=settings,
            origin=Origin.here(),
            began=began,
            split=None if result["split"] is None else Split(**result["split"]),
            losses=tuple(result["losses"]),
            record=Record.from_dict(result["record"]),
        )
        for cell, result in zip(cells, results, strict=True)
    ]


def _train(hooks: Sequence[str], link: str, settings: Settings, report: Report, **place: Any) -> list[dict[str, Any]]:
    job = {"hooks": hooks, "link": link, "settings": asdict(settings)}
    place.update(report=report, timeout_s=settings.timeout_s)
    results: list[dict[str, Any]] = run_ranks("gradwire.tools.measure.train:run", settings.nproc, job, **place)[0]
    return results


def held_by(grid: BenchGrid, path: Path, *, resume: bool) -> Records:
    """The records that `path` holds already. They must be comparable with those that the grid adds.

    Raises:
        SpecError: The file exists and `resume` is False, or its runs do not compare.
        RecordsError: The file cannot be read or written.
    """
    if not path.exists() or not path.stat().st_size:
        _check_writable(path)
        return Records([], [])
    if not resume:
        raise SpecError(f"{path} exists: add --resume to measure what it does not hold yet, or take another --out")
    held = read(path)
    ours = conditions(grid.settings, Origin.here())
    for run in held.runs:
        if different := differences(run.conditions, ours):
            raise SpecError(
                f"{path} holds runs that differ from these in {', '.join(different)} and so are not comparable: take "
                "another --out"
            )
    return held


def measure_cells(grid: BenchGrid, missing: Sequence[Cell], path: Path, report: Report) -> None:
    """Measure cells and append them to `path`, all hooks of a link and a number of ranks at once.

    Such hooks train in turns, so that a noisy minute affects all of them alike.
    """
    done = 0
    for (repeat, ranks, link), cells in itertools.groupby(missing, lambda cell: (cell.repeat, cell.ranks, cell.link)):
        group = list(cells)
        settings = replace(grid.settings, nproc=ranks, seed=grid.settings.seed + repeat)
        where = f"{ranks} ranks, link {link}, repeat {repeat + 1} of {grid.repeats}"
        before, part = done / len(missing), len(group) / len(missing)
        append(path, run_group(grid, group, settings, _within(report, before, part, where)))
        done += len(group)


def _within(report: Report, before: float, share: float, where: str) -> Report:
    return lambda part, doing: report(before + part * share, f"{where}: {doing}")


def _check_writable(path: Path) -> None:
    """Before anything is measured, not after the first cell."""
    try:
        path.open("a").close()
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from error
