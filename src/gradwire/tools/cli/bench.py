"""`gradwire bench`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.tools.cli.arguments import add_json, add_verb
from gradwire.tools.measure.grid import BASELINES, BenchGrid, all_hooks, held_by, measure_cells
from gradwire.tools.records.jsonl import json_text, read
from gradwire.tools.records.progress import progress
from gradwire.tools.records.records import NO_LINK, SCHEMA, Cell, Run, Settings
from gradwire.tools.report.summary import summarise
from gradwire.tools.report.tables import section
from gradwire.tools.report.write import check_writable

STEPS = 40
DESCRIPTION = """\
Train the same small GPT under every hook, on every link and number of ranks, and append a record for each to a file.
Hooks on the same link and number of ranks train in turns, and their records are written together at the end. After
Ctrl-C, --resume continues with the missing records.
"""
EXAMPLES = """\
gradwire bench
gradwire bench --hooks bf16 int8 int4 --links none 1gbit 100mbit,latency=5ms --repeats 3
gradwire bench --ranks 2 4 --out ranks.jsonl --resume
gradwire report records.jsonl
"""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "bench", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option(
        "--hooks",
        nargs="+",
        default=[],
        metavar="HOOK",
        help=f"specs; {' and '.join(BASELINES)} are always measured too (default: {' '.join(all_hooks())})",
    )
    option("--ranks", nargs="+", type=int, default=[2], metavar="N", help="local processes (default: 2)")
    option(
        "--links",
        nargs="+",
        default=[NO_LINK],
        metavar="LINK",
        help="links to emulate, such as 1gbit or 100mbit,latency=5ms; none is the real link (default: none)",
    )
    option("--steps", type=int, default=STEPS, help="training steps per cell (default: %(default)s)")
    option("--repeats", type=int, default=1, help="runs per cell, each with its own seed (default: 1)")
    option("--seed", type=int, default=0, help="seed of the first repeat (default: 0)")
    option("--out", type=Path, default=Path("records.jsonl"), help="file of records (default: %(default)s)")
    option("--resume", action="store_true", help="continue an existing file: measure what it lacks")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure the cells that the file does not hold yet, and print all cells."""
    grid = BenchGrid(
        hooks=args.hooks,
        links=args.links,
        ranks=args.ranks,
        repeats=args.repeats,
        settings=Settings(steps=args.steps, seed=args.seed),
    )
    check_writable(args.out)
    _measure_missing(grid, args.out, resume=args.resume)
    wanted = set(grid.cells())
    runs = [each for each in read(args.out).runs if each.cell in wanted]
    print(to_json(runs, args.out) if args.json else to_text(runs, args.out), flush=True)


def _measure_missing(grid: BenchGrid, path: Path, *, resume: bool) -> None:
    held, wanted = held_by(grid, path, resume=resume), grid.cells()
    if held.torn:
        _say(held.torn_text(path))
    done = {run.cell for run in held.runs}
    missing = [cell for cell in wanted if cell not in done]
    if len(missing) < len(wanted):
        _say(f"{len(wanted) - len(missing)} of {len(wanted)} cells are in {path} already")
    try:
        with progress(sys.stderr, "gradwire bench") as report:
            measure_cells(grid, missing, path, report)
    except KeyboardInterrupt:
        _say(_saved_text(wanted, path))
        raise


def _say(text: str) -> None:
    print(f"gradwire bench: {text}", file=sys.stderr)


def _saved_text(wanted: Sequence[Cell], path: Path) -> str:
    """What an interrupted run has saved: the cells of whole links and numbers of ranks."""
    saved = len({run.cell for run in read(path).runs} & set(wanted))
    if not saved:
        return "nothing is saved yet, as all hooks of a link and number of ranks train in turns and end together"
    return f"{saved} of {len(wanted)} cells are in {path}; continue with --resume"


def to_json(runs: Sequence[Run], path: Path) -> str:
    """The records, with the version of their schema and the path of the file."""
    return json_text({"schema": SCHEMA, "path": str(path), "records": [run.as_dict() for run in runs]})


def to_text(runs: Sequence[Run], path: Path) -> str:
    """A table and a recommendation for every link and number of ranks, and where the records are."""
    parts = [section(group) for group in summarise(runs).groups]
    return "\n".join([*parts, f"{len(runs)} records in {path}; as a page: gradwire report {path}"])
