"""`gradwire demo`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gradwire.bench.demo import LIMIT_S, demo
from gradwire.bench.measure import all_hooks
from gradwire.bench.records import Settings

DEFAULTS = Settings()
EXAMPLES = """\
examples:
  gradwire demo
  gradwire demo --hooks fp16 bf16:accumulate=wire --steps 200
  gradwire demo --nproc 4 --seed 1 --json > demo.json
"""


def add(verbs: Any) -> None:
    """The verb and its options."""
    parser = verbs.add_parser(
        "demo",
        help="train a small GPT under plain DDP and under each hook, and compare",
        description="Train the same small GPT from the same seed on local processes, under plain DDP and under each\n"
        "hook, and print step time, bytes sent, gradient error and loss.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, default=DEFAULTS.nproc, help="local processes (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"training steps under each hook (default: {DEFAULTS.steps}, or as many as {LIMIT_S:.0f} s allow)",
    )
    parser.add_argument(
        "--hooks",
        nargs="+",
        default=all_hooks(),
        metavar="HOOK",
        help=f"hooks to compare with plain DDP, as specs (default: {' '.join(all_hooks())})",
    )
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    limit_s = LIMIT_S if args.steps is None else None
    steps = DEFAULTS.steps if args.steps is None else args.steps
    settings = Settings(nproc=args.nproc, steps=steps, seed=args.seed, limit_s=limit_s)
    demo(args.hooks, settings, as_json=args.json, out=sys.stdout, err=sys.stderr)
