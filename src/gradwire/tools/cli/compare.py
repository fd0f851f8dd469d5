"""`gradwire compare`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from gradwire.errors import SpecError
from gradwire.tools.cli.advise import check_hooks
from gradwire.tools.cli.arguments import add_json, add_link, add_script, add_verb, ranks_of, script_of
from gradwire.tools.measure.compare import Entry, Plan, compare
from gradwire.tools.measure.headroom import EXTRA_STEPS, built_in
from gradwire.tools.records.curves import read_curves
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.progress import progress
from gradwire.tools.records.verdicts import conclude
from gradwire.tools.report.comparison import to_html, to_text
from gradwire.tools.report.write import check_page, check_writable, save

DESCRIPTION = """\
Run an unmodified script under several hooks with the same seeds, record the loss of every step, and report whether a
hook harms the training: the gap to the reference, its confidence interval, and the smallest gap that these runs could
have shown. The runs are kept in a file; a second call with the same file runs only what is missing.
"""
EXAMPLES = """\
gradwire compare --hooks exact int4 sign --steps 100                                  the built-in GPT on 2 ranks
gradwire compare --hooks exact int4 powersgd:rank=8 --steps 300 --nproc 2 train.py --epochs 1
gradwire compare --hooks exact int4 --steps 300 --link 100mbit --nproc 2 train.py     loss over seconds on that link
gradwire compare --hooks exact int2 --metric val_loss --nproc 2 train.py              a value of gradwire.log
gradwire compare --hooks exact int8/bf16 int8/int8 --steps 300 --nproc 2 fsdp2.py     a script with fully_shard
gradwire compare --variant "adamw=" --variant "lion=--optimizer lion" --steps 500 --nproc 2 train.py
"""
STEPS = 300
"""For the built-in GPT."""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "compare", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option(
        "--hooks",
        nargs="+",
        default=[],
        metavar="SPEC",
        help="hooks to compare, the reference first; plain is DDP without a hook, and int8/bf16 a hook and a gather of "
        "a model with fully_shard",
    )
    option(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=[@HOOK] ARGS",
        help="the script with more arguments, under a hook if one is named; several are possible",
    )
    option("--reference", metavar="NAME", help="the hook or variant to compare with (default: the first one)")
    option("--steps", type=int, help="end the script after so many steps (default: at its own end)")
    option("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: %(default)s)")
    option("--first-seed", type=int, default=0, metavar="N", help="the first of them (default: %(default)s)")
    option("--seed-arg", metavar="OPTION", help="an option of the script that takes a seed, such as --seed-arg=--seed")
    option("--metric", metavar="NAME", help="compare the last value of gradwire.log(NAME, value) instead of the loss")
    option(
        "--target-loss",
        type=float,
        metavar="LOSS",
        help="report which hook reaches this loss first (default: the final loss of the reference)",
    )
    option("--tolerance", type=float, metavar="GAP", help="gaps below this count as small (default: the seeds' spread)")
    option("--gather", metavar="SPEC", help="for models with fully_shard: how parameters are gathered, such as bf16")
    add_link(parser)
    option(
        "--out", type=Path, default=Path("compare.jsonl"), help="file of runs, made or continued (default: %(default)s)"
    )
    option("--report", type=Path, metavar="PATH", help="write a page with loss curves, such as compare.html")
    add_json(parser)
    add_script(parser, required=False)


def run(args: argparse.Namespace) -> None:
    """Run what is missing, and print the comparison."""
    check_hooks(args.hooks)
    plan = plan_of(args)
    check_writable(args.out)
    if args.report is not None:
        check_page(args.report)
    with progress(sys.stderr, "gradwire compare") as report:
        compare(plan, args.out, report=report)
    names, seeds = [entry.name for entry in plan.entries], set(plan.seeds)
    curves = [curve for curve in read_curves(args.out) if curve.name in names and curve.seed in seeds]
    result = conclude(curves, names, target=args.target_loss, tolerance=args.tolerance)
    if args.report is not None:
        save(args.report, to_html(result))
    paths = {"runs": str(args.out), "report": None if args.report is None else str(args.report)}
    where = "\n".join(f"{name}: {path}" for name, path in paths.items() if path is not None)
    print(json_text({**result.as_dict(), **paths}) if args.json else f"{to_text(result)}\n\n{where}", flush=True)


def plan_of(args: argparse.Namespace) -> Plan:
    """What to run. SpecError if that makes no sense."""
    if args.seeds < 1:
        raise SpecError(f"--seeds must be at least 1, got {args.seeds}")
    entries = [*map(Entry.of_hook, args.hooks), *map(Entry.of_variant, args.variant)]
    if args.reference is not None:
        entries.sort(key=lambda entry: entry.name != args.reference)
        if not entries or entries[0].name != args.reference:
            raise SpecError(f"--reference {args.reference} must be one of {', '.join(entry.name for entry in entries)}")
    ranks = ranks_of(args)
    script, nproc = script_of(args) if args.script else None, ranks["nproc"]
    if script is None:
        script, nproc = built_in((args.steps or STEPS) + EXTRA_STEPS, nproc)
    return Plan(
        script=script,
        entries=tuple(entries),
        seeds=tuple(range(args.first_seed, args.first_seed + args.seeds)),
        steps=args.steps if args.script else args.steps or STEPS,
        link=args.link,
        gather=args.gather,
        metric=args.metric,
        seed_arg=args.seed_arg,
        nproc=nproc,
        torchrun=tuple(ranks["torchrun"]),
    )
