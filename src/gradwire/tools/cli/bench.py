"""`gradwire bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gradwire.tools.measure.grid import BASELINES, Grid, bench
from gradwire.tools.measure.hooks import all_hooks
from gradwire.tools.records.records import NO_LINK, Settings
from gradwire.tools.report.write import check_writable

STEPS = 40
EXAMPLES = """\
examples:
  gradwire bench
  gradwire bench --hooks bf16 int8 int4 --links none 1gbit 100mbit,latency=5ms --repeats 3
  gradwire bench --ranks 2 4 --out ranks.jsonl --resume
  gradwire report records.jsonl
"""


def add(verbs: Any, line: str) -> None:
    """The verb, in a line, and its options."""
    parser = verbs.add_parser(
        "bench",
        help=line,
        description="Train the same small GPT under every hook, on every link and number of ranks, and add a record\n"
        "for each to a file. Hooks on the same link and number of ranks train in turns, and their records come\n"
        "together at the end. After Ctrl-C, --resume goes on with what is missing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hooks",
        nargs="+",
        default=[],
        metavar="HOOK",
        help=f"as specs; {' and '.join(BASELINES)} always come too (default: {' '.join(all_hooks())})",
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], metavar="N", help="local processes (default: 2)")
    parser.add_argument(
        "--links",
        nargs="+",
        default=[NO_LINK],
        metavar="LINK",
        help="rates to emulate, as in 1gbit or 100mbit,latency=5ms; none: as it is (default: none)",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps a cell (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="runs a cell, each with its own seed (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat (default: 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("records.jsonl"), help="file of records (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="the file exists: measure only what it does not hold yet")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    grid = Grid(
        hooks=args.hooks,
        links=args.links,
        ranks=args.ranks,
        repeats=args.repeats,
        settings=Settings(steps=args.steps, seed=args.seed),
    )
    check_writable(args.out)
    bench(grid, args.out, resume=args.resume, as_json=args.json, out=sys.stdout, err=sys.stderr)
