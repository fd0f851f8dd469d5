"""`gradwire advise`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from contextlib import nullcontext
from typing import Any

from gradwire.advisor.advise import Advice, advise
from gradwire.advisor.headroom import STEPS
from gradwire.bench.progress import Lines, progress
from gradwire.cli.headroom import WIDTH
from gradwire.cli.headroom import to_text as headroom_text
from gradwire.cli.script import add_script, ranks_of, script_of

EXAMPLES = """\
examples:
  gradwire advise                                        the built-in GPT on 2 local ranks
  gradwire advise --link 1gbit                           the same, as if on a link of 1 Gbit/s
  gradwire advise --nproc 2 train.py --epochs 1          your own script, unmodified, until enough is known
  gradwire advise --max-error 0.1 --hooks int8 int4 powersgd:rank=8 --nproc 2 train.py
"""


def add(verbs: Any) -> None:
    """The verb and its options."""
    parser = verbs.add_parser(
        "advise",
        help="which hook is best for this model on this network, if any",
        description="Measure the headroom, predict the step time of every hook, measure the most promising ones, check "
        "their\nerror on the model's own gradients, and recommend one, or none.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--max-error", type=float, default=0.02, help="of the mean, relative (default: %(default)s)")
    parser.add_argument("--hooks", nargs="+", default=[], metavar="SPEC", help="look at these only (default: all)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="steps to time for the headroom (default: %(default)s)"
    )
    parser.add_argument("--link", metavar="LINK", help="emulate a slower link, such as 100mbit,latency=5ms")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_script(parser, required=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    script, ranks = script_of(args) if args.script else None, ranks_of(args)
    title = "gradwire advise"
    with progress(sys.stderr, title) if script is None else nullcontext(Lines(sys.stderr, title).show) as report:
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
        print(json.dumps(found.as_dict(), indent=2) if args.json else to_text(found), flush=True)


def to_text(found: Advice) -> str:
    """What is printed."""
    lines = [headroom_text(found.headroom), "", HEADER]
    for row in sorted(found.rows, key=lambda row: row.measured_s or row.predicted_s):
        measured = "-" if row.measured_s is None else f"{1e3 * row.measured_s:.1f}"
        mark = " <-" if row.hook == found.pick else " error too large" if row.error > found.max_error else ""
        lines.append(
            f"{row.hook:<24}{1e3 * row.predicted_s:>13.1f}{measured:>13}{row.sent_bytes / 1e6:>10.2f}{row.error:>10.1e}"
            f"{mark}"
        )
    return "\n".join([*lines, "", textwrap.fill(found.reason(), WIDTH), "", f"    {found.line}"])


HEADER = f"{'hook':<24}{'predicted ms':>13}{'measured ms':>13}{'MB sent':>10}{'error':>10}"
