"""`gradwire advise`."""

import argparse
import functools
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gradwire.errors import SpecError
from gradwire.tools.cli.arguments import (
    add_json,
    add_link,
    add_script,
    add_verb,
    error_limit,
    ranks_of,
    results_to,
    script_of,
)
from gradwire.tools.cli.headroom import WIDTH
from gradwire.tools.cli.headroom import to_text as headroom_text
from gradwire.tools.measure.advise import Advice, Row, advise
from gradwire.tools.measure.headroom import STEPS
from gradwire.tools.measure.survey_sharded import changes_weights
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.progress import Lines, progress
from gradwire.tools.records.recommend import BASELINE
from gradwire.tools.records.table import text_table
from gradwire.tools.report.page import advice_to_html
from gradwire.tools.report.write import check_page, save

HEADS = ("hook", "predicted ms", "measured ms", "speed-up", "MB sent", "error", "")
SHARDED_HEADS = ("hook/gather", *HEADS[1:4], "MB grads + params", *HEADS[5:])
DESCRIPTION = """\
Measure the headroom, predict the step time of every hook, measure the most promising hooks and their error on the
model's own gradients, and recommend one, or none.
"""
EXAMPLES = """\
gradwire advise                                        the built-in GPT on 2 local ranks
gradwire advise --link 1gbit                           the same on an emulated link of 1 Gbit/s
gradwire advise --nproc 2 train.py --epochs 1          a script of yours, unmodified, until enough is known
gradwire advise --report report.html --nproc 2 train.py
                                                       the same, and a page with charts
gradwire advise --hooks int8 int8/bf16 -- fsdp2.py       fully_shard: gradients in int8, parameters in bf16
gradwire advise --max-error 0.1 --hooks int8 int4 powersgd:rank=8 --nproc 2 train.py
"""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "advise", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option(
        "--max-error",
        type=functools.partial(error_limit, finite=True),
        default=0.02,
        help="largest relative error of the mean (default: %(default)s)",
    )
    option("--hooks", nargs="+", default=[], metavar="SPEC", help="hooks to choose from (default: all)")
    option("--steps", type=int, default=STEPS, help="steps to time for the headroom (default: %(default)s)")
    add_link(parser)
    option("--report", type=Path, metavar="PATH", help="write a page with charts, such as report.html")
    add_json(parser)
    add_script(parser, required=False)


def run(args: argparse.Namespace) -> None:
    """Measure and print the advice."""
    check_hooks(args.hooks)
    script, ranks = script_of(args) if args.script else None, ranks_of(args)
    title = "gradwire advise"
    if args.report is not None:
        check_page(args.report)
    with (
        results_to(alone=args.json and script is not None),
        progress(sys.stderr, title) if script is None else nullcontext(Lines(sys.stderr, title).show) as report,
    ):
        advice = advise(
            script, hooks=args.hooks, max_error=args.max_error, steps=args.steps, link=args.link, report=report, **ranks
        )
    if advice is not None:
        if args.report is not None:
            save(args.report, advice_to_html(advice))
        print(to_json(advice, args.report) if args.json else to_text(advice, args.report), flush=True)


def check_hooks(hooks: Sequence[str]) -> None:
    """SpecError if a script is among the hooks: `--hooks` takes every word up to the next option."""
    for at, word in enumerate(hooks):
        if Path(word).is_file():
            given = " ".join(hooks[:at] or ["SPEC"])
            raise SpecError(
                f"--hooks takes every word up to the next option, so {word!r} as well; put -- before the script: "
                f"--hooks {given} -- {word}"
            )


def to_json(advice: Advice, path: Path | None) -> str:
    """Everything, with the path of the page."""
    return json_text({**advice.as_dict(), "report": None if path is None else str(path)})


def to_text(advice: Advice, path: Path | None = None) -> str:
    """The headroom, the table of hooks, and the recommendation."""
    parts = [headroom_text(advice.headroom), hooks_text(advice), answer_text(advice)]
    return "\n\n".join([*parts, *([] if path is None else [f"report: {path}"])])


def hooks_text(advice: Advice) -> str:
    """The table of hooks: first the measured ones, from the fastest, then the others by their predicted time."""
    exact = next(row for row in advice.rows if row.hook == BASELINE)
    ordered = sorted(advice.rows, key=lambda row: (row.measured_s is None, row.measured_s or row.predicted_s))
    heads = HEADS if exact.gather_bytes is None else SHARDED_HEADS
    return text_table([heads, *(_cells(row, exact, advice) for row in ordered)], right=range(1, 6))


def answer_text(advice: Advice) -> str:
    """The recommendation, and the line to add to the script."""
    return f"{textwrap.fill(advice.reason(), WIDTH)}\n\n    {advice.line}"


def _cells(row: Row, exact: Row, advice: Advice) -> tuple[str, ...]:
    measured = speed_up = "-"
    if row.measured_s is not None:
        measured = f"{1e3 * row.measured_s:.1f}"
        speed_up = f"{(exact.measured_s or row.measured_s) / row.measured_s:.2f}x"
    mark = "<- use this" if row.hook == advice.recommendation.hook else ""
    if row.error > advice.max_error:
        mark = "error too large"
    elif row.gather_bytes is not None and changes_weights(row.hook):
        mark = mark or "changes the weights"
    times = f"{1e3 * row.predicted_s:.1f}", measured, speed_up
    return row.hook, *times, _sent(row), f"{row.error:.1e}", mark


def _sent(row: Row) -> str:
    """For models with `fully_shard` gradients and parameters separately."""
    if row.gather_bytes is None:
        return f"{row.sent_bytes / 1e6:.2f}"
    return f"{(row.sent_bytes - row.gather_bytes) / 1e6:.2f} + {row.gather_bytes / 1e6:.2f}"
