"""`gradwire headroom`."""

import argparse
import statistics
import sys
import textwrap
from contextlib import nullcontext
from typing import Any

from gradwire.errors import SpecError
from gradwire.tools.cli.arguments import add_json, add_link, add_script, add_verb, ranks_of, results_to, script_of
from gradwire.tools.launch.launch import is_rank
from gradwire.tools.measure.headroom import FEW, STEPS, Headroom, headroom
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.progress import Lines, progress
from gradwire.tools.records.records import quartiles
from gradwire.tools.records.table import text_table

DESCRIPTION = """\
Time the steps of a training, in turns with and without communication, and report whether a hook could make it faster.
The training is not changed: in a step that is timed without communication, the gradients are averaged after the clock
has stopped. For models with fully_shard (FSDP2), the gathers of parameters and the reductions of gradients are timed
separately, and with a 2-D mesh (HSDP) the averages across replicas too.
"""
EXAMPLES = """\
gradwire headroom                                      the built-in GPT on 2 local ranks
gradwire headroom --link 1gbit,latency=1ms             the same on an emulated, slower link
gradwire headroom --nproc 2 train.py --epochs 1        your own script, unmodified
gradwire headroom --steps 200 --stop --nproc 2 train.py
torchrun --nnodes 2 ... -m gradwire headroom train.py
"""
WIDTH = 100


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "headroom", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option("--steps", type=int, default=STEPS, help="steps to time, of both kinds together (default: %(default)s)")
    add_link(parser)
    option("--stop", action="store_true", help="end the script when the steps are timed")
    add_json(parser)
    add_script(parser, required=False)


def run(args: argparse.Namespace) -> None:
    """Measure and print the result."""
    script, ranks = script_of(args) if args.script else None, ranks_of(args)
    if args.stop and is_rank(**ranks):
        raise SpecError("--stop ends ranks that gradwire starts (--nproc N), but a launcher has started this one")
    title = "gradwire headroom"  # a bar would mix with the output of a script
    results: list[Headroom] = []
    with (
        results_to(alone=args.json and script is not None) as out,
        progress(sys.stderr, title) if script is None else nullcontext(Lines(sys.stderr, title).show) as report,
    ):

        def tell(result: Headroom) -> None:
            results.append(result)
            print(json_text(result.as_dict()) if args.json else to_text(result), file=out, flush=True)

        options = {"steps": args.steps, "link": args.link, "stop": args.stop, "report": report}
        last = headroom(script, tell=None if script is None else tell, **options, **ranks)
        if last is not None and not results:
            tell(last)


def to_text(result: Headroom) -> str:
    """The table of step times, and the verdict."""
    low, high = result.exposed_between
    link = "" if result.link is None else f", on an emulated link of {result.link}"
    interval = f"{'95%' if len(result.rounds()) >= FEW else 'seen'}: {low:.1%} to {high:.1%}"
    rows = [
        ("step time of the slowest rank", "median ms", "quartiles"),
        ("with communication", *_times(result.with_s)),
        *((name, *_times(times_s)) for name, times_s in _kinds(result).items() if times_s),
        ("without communication", *_times(result.without_s)),
        ("exposed communication", f"{result.exposed_s * 1e3:.2f}", f"{result.exposed:.1%} of a step ({interval})"),
        *_parts(result),
        ("ceiling on speed-up", f"{result.ceiling:.2f}x", ""),
    ]
    title = f"{len(result.with_s)} steps of each kind on {result.ranks} ranks{link}"
    return "\n".join([title, text_table(rows, right={1}), textwrap.fill(result.verdict(), WIDTH)])


def _kinds(result: Headroom) -> dict[str, tuple[float, ...]]:
    """The steps of a model with `fully_shard` that are timed without a part of its communication."""
    return {
        "without reductions": result.without_reductions_s,
        "without gathers": result.without_gathers_s,
        "without replicas": result.without_replicas_s,
    }


PARTS = {
    "reductions": "  reductions of gradients",
    "gathers": "  gathers of parameters",
    "replicas": "  averages across replicas",
}


def _parts(result: Headroom) -> list[tuple[str, str, str]]:
    """Of a model with `fully_shard`: what each direction takes."""
    step_s = statistics.median(result.with_s)
    found = result.parts_s() if result.is_sharded else {}
    return [(PARTS[name], f"{part_s * 1e3:.2f}", f"{part_s / step_s:.1%} of a step") for name, part_s in found.items()]


def _times(times_s: tuple[float, ...]) -> tuple[str, str]:
    low_s, high_s = quartiles(times_s)
    return f"{statistics.median(times_s) * 1e3:.2f}", f"{low_s * 1e3:.2f} to {high_s * 1e3:.2f}"
