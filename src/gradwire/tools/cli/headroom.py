"""`gradwire headroom`."""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from contextlib import nullcontext
from typing import Any

from gradwire.errors import SpecError
from gradwire.tools.cli.script import add_script, ranks_of, results, script_of
from gradwire.tools.launch.follow import is_rank
from gradwire.tools.measure.headroom import FEW, STEPS, Headroom, headroom
from gradwire.tools.records import plain
from gradwire.tools.records.progress import Lines, progress

EXAMPLES = """\
examples:
  gradwire headroom                                      the built-in GPT on 2 local ranks
  gradwire headroom --link 1gbit,latency=1ms             the same, as if on a slower link
  gradwire headroom --nproc 2 train.py --epochs 1        your own script, unmodified
  gradwire headroom --steps 200 --stop --nproc 2 train.py
  torchrun --nnodes 2 ... -m gradwire headroom train.py
"""
WIDTH = 100


def add(verbs: Any, line: str) -> None:
    """The verb, in a line, and its options."""
    parser = verbs.add_parser(
        "headroom",
        help=line,
        description="Train by turns with and without communication, and say whether a hook could make the run faster.\n"
        "The training is not changed: gradients of steps without are averaged later, off the clock.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to time, of both kinds (default: %(default)s)")
    parser.add_argument("--link", metavar="LINK", help="emulate a slower link, such as 100mbit,latency=5ms")
    parser.add_argument("--stop", action="store_true", help="end the script once the steps are timed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_script(parser, required=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    script, ranks = script_of(args) if args.script else None, ranks_of(args)
    if args.stop and is_rank(**ranks):
        raise SpecError("--stop ends ranks that gradwire starts (--nproc N); here a launcher has started them")
    title = "gradwire headroom"  # a bar would fight with what the script prints
    told: list[Headroom] = []
    with (
        results(alone=args.json and script is not None) as out,
        progress(sys.stderr, title) if script is None else nullcontext(Lines(sys.stderr, title).show) as report,
    ):

        def tell(found: Headroom) -> None:
            told.append(found)
            print(plain.to_json(found.as_dict()) if args.json else to_text(found), file=out, flush=True)

        options = {"steps": args.steps, "link": args.link, "stop": args.stop, "report": report}
        found = headroom(script, tell=None if script is None else tell, **options, **ranks)
        if found is not None and not told:
            tell(found)


def to_text(found: Headroom) -> str:
    """What is printed."""
    low, high = found.exposed_between
    link = "" if found.link is None else f", on an emulated link of {found.link}"
    lines = [
        f"{len(found.with_s)} steps of each kind on {found.ranks} ranks{link}; median (quartiles), slowest rank:",
        f"  with communication     {_times(found.with_s)}",
        f"  without communication  {_times(found.without_s)}",
        f"  exposed communication  {found.exposed_s * 1e3:8.2f} ms, {found.exposed:.1%} of a step "
        f"({'95%' if len(found.rounds()) >= FEW else 'seen'}: {low:.1%} to {high:.1%})",
        f"  ceiling on speed-up    {found.ceiling:8.2f} x",
        textwrap.fill(found.verdict(), WIDTH),
    ]
    return "\n".join(lines)


def _times(times_s: tuple[float, ...]) -> str:
    low_s, _, high_s = statistics.quantiles(times_s, n=4, method="inclusive")
    return f"{statistics.median(times_s) * 1e3:8.2f} ms ({low_s * 1e3:.2f} to {high_s * 1e3:.2f})"
