"""`gradwire advise`."""

import argparse
import functools
import shlex
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
from gradwire.tools.measure.compare import Entry, Plan, compare
from gradwire.tools.measure.headroom import EXTRA_STEPS, STEPS, built_in
from gradwire.tools.measure.survey_sharded import changes_weights
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.progress import Lines, progress
from gradwire.tools.records.recommend import BASELINE, PAYS
from gradwire.tools.records.table import text_table
from gradwire.tools.records.verdicts import Comparison, conclude
from gradwire.tools.report.comparison import to_text as comparison_text
from gradwire.tools.report.page import advice_to_html
from gradwire.tools.report.write import check_page, check_writable, save

HEADS = ("hook", "predicted ms", "measured ms", "speed-up", "MB sent", "error", "")
REPLICA_HEADS = ("replicas", *HEADS[1:4], "MB across", *HEADS[5:])
SHARDED_HEADS = ("hook/gather", *HEADS[1:4], "MB grads + params", *HEADS[5:])
DESCRIPTION = """\
Measure the headroom, predict the step time of every hook, measure the most promising hooks and their error on the
model's own gradients, and recommend one, or none.
"""
EXAMPLES = """\
gradwire advise                                        the built-in GPT on 2 local ranks
gradwire advise --link 1gbit                           the same on an emulated link of 1 Gbit/s
gradwire advise --nproc 2 train.py --epochs 1          your script, unmodified; it ends when enough is measured
gradwire advise --report report.html --nproc 2 train.py
                                                       the same, and a page with charts
gradwire advise --hooks int8 int8/bf16 -- fsdp2.py     fully_shard: gradients in int8, parameters in bf16
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
    option(
        "--compare",
        type=Path,
        nargs="?",
        const=Path("compare.jsonl"),
        metavar="PATH",
        help="then run the script under the faster hooks with a larger error as `gradwire compare` does, and recommend "
        "by the time to a loss; the runs are kept in a file (default: compare.jsonl)",
    )
    option("--compare-steps", type=int, default=300, metavar="N", help="steps of these runs (default: %(default)s)")
    option("--seeds", type=int, default=5, metavar="N", help="seeds of these runs (default: %(default)s)")
    add_json(parser)
    add_script(parser, required=False)


def run(args: argparse.Namespace) -> None:
    """Measure and print the advice."""
    check_hooks(args.hooks)
    script, ranks = script_of(args) if args.script else None, ranks_of(args)
    title = "gradwire advise"
    if args.report is not None:
        check_page(args.report)
    if args.compare is not None:
        check_writable(args.compare)
        _plan(args, ("exact", "bf16"))  # before anything is measured
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
        compared = None if args.compare is None else _compared(args, advice)
        print(_json(advice, compared, args) if args.json else _text(advice, compared, args), flush=True)


def _plan(args: argparse.Namespace, hooks: Sequence[str]) -> Plan:
    """The runs of `--compare`."""
    given = script_of(args) if args.script else None
    ranks = ranks_of(args)
    script, nproc = (given, ranks["nproc"]) if given else built_in(args.compare_steps + EXTRA_STEPS, ranks["nproc"])
    return Plan(
        script=script,
        entries=tuple(map(Entry.of_hook, dict.fromkeys(hooks))),
        seeds=tuple(range(args.seeds)),
        steps=args.compare_steps,
        link=args.link,
        nproc=nproc,
        torchrun=tuple(ranks["torchrun"]),
    )


def _compared(args: argparse.Namespace, advice: Advice) -> Comparison | None:
    """None if there is no hook whose harm is a question."""
    if not advice.promising():
        return None
    plan = _plan(args, ("exact", advice.pick, *(row.hook for row in advice.promising())))
    with progress(sys.stderr, "gradwire advise: compare") as report:
        curves = compare(plan, args.compare, report=report)
    return conclude(curves, [entry.name for entry in plan.entries])


def _json(advice: Advice, compared: Comparison | None, args: argparse.Namespace) -> str:
    more = {"promising": [row.hook for row in advice.promising()], "compare": compare_command(advice, args)}
    found = None if compared is None else {**compared.as_dict(), "recommendation": compared.recommendation()}
    path = None if args.report is None else str(args.report)
    return json_text({**advice.as_dict(), **more, "report": path, "comparison": found})


def _text(advice: Advice, compared: Comparison | None, args: argparse.Namespace) -> str:
    if compared is not None:
        return f"{to_text(advice, args.report)}\n\n{comparison_text(compared)}\n\nruns: {args.compare}"
    command = compare_command(advice, args)
    if command is None:
        return to_text(advice, args.report) + ("" if args.compare is None else f"\n\n{_nothing(advice)}")
    faster = ", ".join(f"{row.hook} (predicted {_predicted(row)} ms)" for row in advice.promising())
    words = f"Faster, if it does not hurt: {faster}. Find out with"
    return f"{to_text(advice, args.report)}\n\n{textwrap.fill(words, WIDTH)}\n\n    {command}"


def _nothing(advice: Advice) -> str:
    """Why `--compare` has run nothing."""
    if advice.headroom.is_sharded:
        why = "gradwire compare takes no pairs of hooks for fully_shard."
    elif not advice.headroom.is_network_bound:
        why = "the training is not network-bound."
    else:
        why = f"no hook with an error above {advice.max_error:g} is predicted to be {PAYS:.2f}x as fast as the others."
    return textwrap.fill(f"Nothing was compared: {why}", WIDTH)


def compare_command(advice: Advice, args: argparse.Namespace) -> str | None:
    """What to paste into a shell to find out whether the promising hooks harm the training."""
    hooks = [row.hook for row in advice.promising()]
    if not hooks:
        return None
    words = ["gradwire", "compare", "--hooks", *dict.fromkeys(("exact", advice.pick, *hooks))]
    words += ["--steps", str(args.compare_steps), *([] if args.link is None else ["--link", args.link])]
    words += [] if args.nproc is None else ["--nproc", str(args.nproc)]
    script = [*(["-m"] if args.module else ["--"] if args.nproc is None else []), args.script] if args.script else []
    return shlex.join([*words, *script, *args.args])


def check_hooks(hooks: Sequence[str]) -> None:
    """SpecError if a script is among the hooks: `--hooks` takes every word up to the next option."""
    for at, word in enumerate(hooks):
        if Path(word).is_file():
            given = " ".join(hooks[:at] or ["SPEC"])
            raise SpecError(
                f"--hooks takes every word up to the next option, so {word!r} as well; put -- before the script: "
                f"--hooks {given} -- {word}"
            )


def to_text(advice: Advice, path: Path | None = None) -> str:
    """The headroom, the table of hooks, and the recommendation."""
    parts = [headroom_text(advice.headroom), hooks_text(advice), answer_text(advice)]
    return "\n\n".join([*parts, *([] if path is None else [f"report: {path}"])])


def hooks_text(advice: Advice) -> str:
    """The table of hooks: first the measured ones, from the fastest, then the others by their predicted time."""
    exact = next(row for row in advice.rows if row.hook == BASELINE)
    ordered = sorted(advice.rows, key=lambda row: (row.measured_s is None, row.measured_s or row.predicted_s))
    heads = HEADS if exact.gather_bytes is None else SHARDED_HEADS
    heads = REPLICA_HEADS if advice.headroom.is_replicated else heads
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
        mark = "faster, if it does not hurt" if row in advice.promising() else "error too large"
    elif row.gather_bytes is not None and changes_weights(row.hook):
        mark = mark or "changes the weights"
    return row.hook, _predicted(row), measured, speed_up, _sent(row), f"{row.error:.1e}", mark


def _predicted(row: Row) -> str:
    """In milliseconds, and how far that may be off."""
    return f"{1e3 * row.predicted_s:.1f} ±{row.uncertainty:.0%}"


def _sent(row: Row) -> str:
    """For models with `fully_shard` gradients and parameters separately."""
    if row.gather_bytes is None:
        return f"{row.sent_bytes / 1e6:.2f}"
    return f"{(row.sent_bytes - row.gather_bytes) / 1e6:.2f} + {row.gather_bytes / 1e6:.2f}"
