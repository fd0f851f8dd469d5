"""The bench verb: hooks x links x ranks x repeats, measured cell by cell into a file that another call can continue."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from gradwire.errors import SpecError
from gradwire.tools.launch.link import Link
from gradwire.tools.launch.local import check_nproc, run_ranks
from gradwire.tools.measure.hooks import all_hooks, checked
from gradwire.tools.records import plain
from gradwire.tools.records.jsonl import Records, RecordsError, append, read
from gradwire.tools.records.progress import progress
from gradwire.tools.records.records import NO_LINK, PLAIN, SCHEMA, Cell, Origin, Record, Run, Settings, Split

BASELINES = ("exact", "noop")
"""Always measured: what a hook has to beat, and what no hook can."""

Report = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to measure. Hooks and links are written canonically, each once, the baselines first."""

    hooks: Sequence[str] = ()
    """Specs, beside the baselines. None given: all there are."""
    links: Sequence[str] = (NO_LINK,)
    ranks: Sequence[int] = (2,)
    repeats: int = 1
    settings: Settings = field(default_factory=Settings)
    """Of the first repeat; the seeds of the others follow. The number of ranks in it is not used."""

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


def bench(grid: Grid, path: Path, *, resume: bool, as_json: bool, out: TextIO, err: TextIO) -> None:
    """Measure what `path` does not hold yet. Progress goes to `err`, the tables (or JSON) of all cells to `out`."""
    held = _held(grid, path, resume, err)
    wanted = grid.cells()
    missing = [cell for cell in wanted if cell not in {run.cell for run in held.runs}]
    if len(missing) < len(wanted):
        err.write(f"gradwire bench: {len(wanted) - len(missing)} of {len(wanted)} cells are in {path} already\n")
    try:
        with progress(err, "gradwire bench") as report:
            _measure(grid, missing, path, report)
    except KeyboardInterrupt:
        err.write(f"gradwire bench: {_saved_text(wanted, path)}\n")
        raise
    runs = [run for run in read(path).runs if run.cell in set(wanted)]
    out.write(to_json(runs, path) if as_json else to_text(runs, path))
    out.flush()


def _saved_text(wanted: Sequence[Cell], path: Path) -> str:
    """What an interrupted run leaves. Hooks train in turns, so a group of cells is measured, and saved, all at once."""
    saved = len({run.cell for run in read(path).runs} & set(wanted))
    if not saved:
        return "nothing is saved yet, as all hooks of a link and number of ranks train in turns and end together"
    return f"{saved} of {len(wanted)} cells are in {path}; go on with --resume"


def to_json(runs: Sequence[Run], path: Path) -> str:
    """The records in an envelope."""
    content = {"schema": SCHEMA, "path": str(path), "records": [run.as_dict() for run in runs]}
    return plain.to_json(content) + "\n"


def to_text(runs: Sequence[Run], path: Path) -> str:
    """A table for every link and number of ranks, what it says, and where the records are."""
    from gradwire.tools.report.markdown import section  # the report reads records: at the top this would go in a circle
    from gradwire.tools.report.summary import summarise

    parts = [section(group) for group in summarise(runs).groups]
    return "\n".join([*parts, f"{len(runs)} records in {path}; as a page: gradwire report {path}"]) + "\n"


def _held(grid: Grid, path: Path, resume: bool, err: TextIO) -> Records:
    """What the file holds, which must be of the same grid as what is to come."""
    if not path.exists() or not path.stat().st_size:
        _check_writable(path)
        return Records([], [])
    if not resume:
        raise SpecError(f"{path} exists: add --resume to measure what it does not hold yet, or take another --out")
    held = read(path)
    if held.torn:
        err.write(f"gradwire bench: {held.torn_text(path)}\n")
    here = Origin.here()
    for run in held.runs:
        _same(path, "with other settings", _flat(run.shared), _flat(replace(grid.settings, nproc=1)))
        _same(path, "from another machine or other versions", asdict(run.origin), asdict(here))
    return held


def _check_writable(path: Path) -> None:
    """Now, and not after the first cell."""
    try:
        path.open("a").close()
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from error


def _flat(settings: Settings) -> dict[str, Any]:
    values = asdict(settings)
    return {**values, **values.pop("workload")}


def _same(path: Path, what: str, held: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [f"{key} {held[key]} (now {wanted[key]})" for key in held if held[key] != wanted[key]]
    if different:
        raise SpecError(
            f"{path} holds runs with {', '.join(different)}: runs {what} do not compare; take another --out"
        )


def _measure(grid: Grid, missing: Sequence[Cell], path: Path, report: Report) -> None:
    """Groups of cells that differ in the hook alone train in turns, so that a noisy minute hits all alike."""
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


def run_group(grid: Grid, cells: Sequence[Cell], settings: Settings, report: Report) -> list[Run]:
    """One link and number of ranks: all its hooks in one set of processes."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    job = {"hooks": [cell.hook for cell in cells], "link": cells[0].link, "settings": asdict(settings)}
    results = run_ranks(
        "gradwire.tools.measure.grid_rank:run", settings.nproc, job, report=report, timeout_s=settings.timeout_s
    )
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
        for cell, result in zip(cells, results[0], strict=True)
    ]


def _link(text: str) -> str:
    return NO_LINK if text == NO_LINK else str(Link.parse(text))
