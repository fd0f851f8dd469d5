"""`gradwire demo`."""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from gradwire.tools.cli.advise import answer_text, hooks_text
from gradwire.tools.cli.arguments import add_json, add_verb
from gradwire.tools.cli.headroom import WIDTH
from gradwire.tools.cli.headroom import to_text as headroom_text
from gradwire.tools.demo import TRAINED, Demo, demo, link_text
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.progress import progress
from gradwire.tools.records.records import NO_LINK, Settings
from gradwire.tools.records.table import text_table
from gradwire.tools.report.summary import Group
from gradwire.tools.report.tables import COLUMNS, name, notes
from gradwire.tools.report.write import check_page, save

LINK = "1gbit"
STEPS = 40
PAGE = Path("gradwire-demo.html")
LEFT_OUT = ("wait, ms", "bits per value")
"""Columns of the page that do not fit in a terminal of 80 characters."""
DESCRIPTION = """\
On local processes and an emulated link: measure the time that communication costs a small GPT, recommend a hook for
it, train under that hook and a few others, and write a page with the results.
"""
EXAMPLES = """\
gradwire demo
gradwire demo --link 100mbit,latency=5ms --report slow.html
gradwire demo --hooks int8 int6 powersgd:rank=8 --steps 100
gradwire demo --nproc 4 --seed 1 --json > demo.json
"""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "demo", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option("--link", default=LINK, help=f"link to emulate; {NO_LINK} is the real one (default: %(default)s)")
    option("--nproc", type=int, default=Settings().nproc, help="number of local processes (default: %(default)s)")
    option("--steps", type=int, default=STEPS, help="steps for the headroom and under each hook (default: %(default)s)")
    option(
        "--hooks",
        nargs="+",
        default=[],
        metavar="HOOK",
        help=f"hooks to choose from and to train (default: choose from all, train {' '.join(TRAINED)})",
    )
    option("--seed", type=int, default=0, help="seed of the training (default: %(default)s)")
    option("--report", type=Path, default=PAGE, metavar="PATH", help="page to write (default: %(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, train, write the page and print the results."""
    settings = Settings(nproc=args.nproc, steps=args.steps, seed=args.seed)
    check_page(args.report)
    with progress(sys.stderr, "gradwire demo") as report:
        result = demo(args.hooks, args.link, settings, report)
    save(args.report, result.to_html())
    print(to_json(result, args.report) if args.json else to_text(result, args.report), flush=True)


def to_json(result: Demo, path: Path) -> str:
    """The advice, the records of the training and the path of the page."""
    records = [run.as_dict() for run in result.runs]
    return json_text({"advice": result.advice.as_dict(), "records": records, "report": str(path)})


def to_text(result: Demo, path: Path) -> str:
    """The headroom, the hooks, the training and the recommendation."""
    first = result.runs[0]
    (group,) = result.summary.groups
    title = (
        f"Does compression pay? A GPT of {first.record.params / 1e6:.1f}M parameters on {first.cell.ranks} local ranks"
        f"{link_text(first.cell.link)}."
    )
    parts = [
        textwrap.fill(title, WIDTH),
        f"1. Headroom\n{headroom_text(result.advice.headroom)}",
        f"2. Hooks: predicted, and the most promising ones measured\n{hooks_text(result.advice)}",
        f"3. Training: {first.settings.steps} steps under each hook, the same seed and batches\n{training_text(group)}",
        answer_text(result.advice),
        f"report: {path}",
    ]
    return "\n\n".join(parts)


def training_text(group: Group) -> str:
    """The table of the training, and its notes."""
    shown = [column for column in COLUMNS if column.head not in LEFT_OUT]
    rows = [["hook", *(column.head for column in shown)]]
    rows += [[name(row), *(column.text(row, group) for column in shown)] for row in group.rows]
    return "\n".join([text_table(rows, right=range(1, len(shown) + 1)), *notes(group)])
