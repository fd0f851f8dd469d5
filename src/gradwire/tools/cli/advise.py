"""`gradwire advise`."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gradwire.errors import SpecError
from gradwire.tools.cli.headroom import WIDTH
from gradwire.tools.cli.headroom import to_text as headroom_text
from gradwire.tools.cli.script import add_script, ranks_of, results, script_of
from gradwire.tools.measure.advise import Advice, Row, advise
from gradwire.tools.measure.headroom import STEPS
from gradwire.tools.records import plain
from gradwire.tools.records.progress import Lines, progress
from gradwire.tools.report.advised import to_page
from gradwire.tools.report.write import check_page, save

EXAMPLES = """\
examples:
  gradwire advise                                        the built-in GPT on 2 local ranks
  gradwire advise --link 1gbit                           the same, as if on a link of 1 Gbit/s
  gradwire advise --nproc 2 train.py --epochs 1          your own script, unmodified, until enough is known
  gradwire advise --report report.html --nproc 2 train.py
                                                         and a page with charts
  gradwire advise --max-error 0.1 --hooks int8 int4 powersgd:rank=8 --nproc 2 train.py
"""


def add(verbs: Any, line: str) -> None:
    """The verb, in a line, and its options."""
    parser = verbs.add_parser(
        "advise",
        help=line,
        description="Measure the headroom, predict the step time of every hook, measure the most promising ones, check "
        "their\nerror on the model's own gradients, and recommend one, or none.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--max-error", type=limit_of, default=0.02, help="of the mean, relative (default: %(default)s)")
    parser.add_argument("--hooks", nargs="+", default=[], metavar="SPEC", help="look at these only (default: all)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="steps to time for the headroom (default: %(default)s)"
    )
    parser.add_argument("--link", metavar="LINK", help="emulate a slower link, such as 100mbit,latency=5ms")
    parser.add_argument("--report", type=Path, metavar="PATH", help="write a page with charts, such as report.html")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_script(parser, required=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    check_hooks(args.hooks)
    script, ranks = script_of(args) if args.script else None, ranks_of(args)
    title = "gradwire advise"
    if args.report is not None:
        check_page(args.report)
    with (
        results(alone=args.json and script is not None),
        progress(sys.stderr, title) if script is None else nullcontext(Lines(sys.stderr, title).show) as report,
    ):
        found = advise(
            script,
            hooks=args.hooks,
            max_error=args.max_error,
            steps=args.steps,
            link=args.link,
            report=report,
            **ranks,
        )
    if found is not None:
        if args.report is not None:
            save(args.report, to_page(found))
        print(to_json(found, args.report) if args.json else to_text(found, args.report), flush=True)


def limit_of(text: str) -> float:
    """A number above 0, and finite: it is a limit that a hook can miss."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text!r}")
    return limit


def check_hooks(hooks: Sequence[str]) -> None:
    """SpecError for a script among them: `--hooks` takes every word up to the next option."""
    for at, word in enumerate(hooks):
        if Path(word).is_file():
            given = " ".join(hooks[:at] or ["SPEC"])
            raise SpecError(
                f"--hooks takes every word up to the next option, so {word!r} as well; put -- before the script: "
                f"--hooks {given} -- {word}"
            )


def to_json(found: Advice, path: Path | None) -> str:
    """Everything, and where the page is."""
    return plain.to_json({**found.as_dict(), "report": None if path is None else str(path)})


def to_text(found: Advice, path: Path | None = None) -> str:
    """What is printed."""
    parts = [headroom_text(found.headroom), hooks_text(found), answer_text(found)]
    return "\n\n".join([*parts, *([] if path is None else [f"report: {path}"])])


def hooks_text(found: Advice) -> str:
    """A row a hook: first those that were measured, from the fastest, then the others as they are predicted."""
    exact = next(row for row in found.rows if row.hook == "exact")
    ordered = sorted(found.rows, key=lambda row: (row.measured_s is None, row.measured_s or row.predicted_s))
    return "\n".join([HEADER, *(_line(row, exact, found) for row in ordered)])


def answer_text(found: Advice) -> str:
    """What to do, and the line to paste."""
    return f"{textwrap.fill(found.reason(), WIDTH)}\n\n    {found.line}"


def _line(row: Row, exact: Row, found: Advice) -> str:
    measured = ratio = "-"
    if row.measured_s is not None:
        measured = f"{1e3 * row.measured_s:.1f}"
        ratio = f"{(exact.measured_s or row.measured_s) / row.measured_s:.2f}x"
    mark = "  <- use this" if row.hook == found.pick and found.compress else ""
    if row.error > found.max_error:
        mark = "  error too large"
    return (
        f"{row.hook:<20}{1e3 * row.predicted_s:>13.1f}{measured:>12}{ratio:>9}{row.sent_bytes / 1e6:>9.2f}"
        f"{row.error:>9.1e}{mark}"
    )


HEADER = f"{'hook':<20}{'predicted ms':>13}{'measured ms':>12}{'speed-up':>9}{'MB sent':>9}{'error':>9}"
