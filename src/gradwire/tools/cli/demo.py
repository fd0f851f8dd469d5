"""`gradwire demo`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from gradwire.tools.cli.advise import answer_text, hooks_text
from gradwire.tools.cli.headroom import WIDTH
from gradwire.tools.cli.headroom import to_text as headroom_text
from gradwire.tools.demo import TRAINED, Demo, demo, link_words
from gradwire.tools.records import plain
from gradwire.tools.records.progress import progress
from gradwire.tools.records.records import NO_LINK, Settings
from gradwire.tools.report.columns import COLUMNS, name, notes
from gradwire.tools.report.summary import Group
from gradwire.tools.report.write import check_page, save

LINK = "1gbit"
STEPS = 40
PAGE = Path("gradwire-demo.html")
LEFT_OUT = ("wait, ms", "bits a value")
"""Columns of the page that a terminal of 80 characters has no room for."""
EXAMPLES = """\
examples:
  gradwire demo
  gradwire demo --link 100mbit,latency=5ms --report slow.html
  gradwire demo --hooks int8 int6 powersgd:rank=8 --steps 100
  gradwire demo --nproc 4 --seed 1 --json > demo.json
"""


def add(verbs: Any, line: str) -> None:
    """The verb, in a line, and its options."""
    parser = verbs.add_parser(
        "demo",
        help=line,
        description="On local processes and an emulated link: measure what the network costs a small GPT, find the\n"
        "best hook for it, train under that and a few others, and write a page with all of it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--link", default=LINK, help=f"to emulate; {NO_LINK}: as it is (default: %(default)s)")
    parser.add_argument("--nproc", type=int, default=Settings().nproc, help="local processes (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="for the headroom, and under each hook (default: %(default)s)"
    )
    parser.add_argument(
        "--hooks",
        nargs="+",
        default=[],
        metavar="HOOK",
        help=f"choose from these, and train them (default: choose from all, train {' '.join(TRAINED)})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the training (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=PAGE, metavar="PATH", help="the page (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    settings = Settings(nproc=args.nproc, steps=args.steps, seed=args.seed)
    check_page(args.report)
    with progress(sys.stderr, "gradwire demo") as report:
        found = demo(args.hooks, args.link, settings, report)
    save(args.report, found.to_html())
    print(to_json(found, args.report) if args.json else to_text(found, args.report), flush=True)


def to_json(found: Demo, path: Path) -> str:
    """Everything."""
    records = [run.as_dict() for run in found.runs]
    return plain.to_json({"advice": found.advice.as_dict(), "records": records, "report": str(path)})


def to_text(found: Demo, path: Path) -> str:
    """What is printed."""
    first = found.runs[0]
    (group,) = found.summary.groups
    title = (
        f"Does compression pay? A GPT of {first.record.params / 1e6:.1f}M parameters on {first.cell.ranks} local ranks"
        f"{link_words(first.cell.link)}."
    )
    parts = [
        textwrap.fill(title, WIDTH),
        f"1. Headroom\n{headroom_text(found.advice.headroom)}",
        f"2. Hooks, the most promising ones measured; errors on the model's own gradients\n{hooks_text(found.advice)}",
        f"3. Training: {first.settings.steps} steps under each hook, the same seed and batches\n{training_text(group)}",
        answer_text(found.advice),
        f"report: {path}",
    ]
    return "\n\n".join(parts)


def training_text(group: Group) -> str:
    """The table, its columns as wide as they must be."""
    shown = [column for column in COLUMNS if column.head not in LEFT_OUT]
    lines = [["hook", *(column.head for column in shown)]]
    lines += [[name(row), *(column.text(row, group) for column in shown)] for row in group.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        first.ljust(widths[0]) + "".join(cell.rjust(width + 2) for cell, width in zip(rest, widths[1:], strict=True))
        for first, *rest in lines
    ]
    return "\n".join([*table, *notes(group)])
