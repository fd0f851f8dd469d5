"""`gradwire run`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from gradwire.tools.cli.arguments import add_link, add_script, add_verb, ranks_of, script_of
from gradwire.tools.launch.run import run as run_script
from gradwire.tools.records.jsonl import json_text

DESCRIPTION = """\
Run an unmodified script under a hook, which is registered when the script builds its DistributedDataParallel, or when
the first forward pass of a model with fully_shard (FSDP2) begins. It is an error if the script has no such model, or
registers a hook of its own.
"""
EXAMPLES = """\
gradwire run --hook bf16 --nproc 2 train.py --epochs 3       like torchrun --nproc-per-node 2 train.py --epochs 3
gradwire run --hook int4 train.py                            a script that starts its ranks itself
gradwire run --hook powersgd:rank=2 --nproc 8 -m project.train
gradwire run --hook int8 --gather bf16 --nproc 4 fsdp2.py    a script with fully_shard
gradwire run --hook int8 --watch --nproc 2 train.py          what the hook does, while the script runs
gradwire run --hook int8 --link 1gbit,latency=1ms --nproc 2 train.py
torchrun --nnodes 2 --nproc-per-node 8 ... -m gradwire.run --hook int4 train.py
"""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "run", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option("--hook", required=True, metavar="SPEC", help="the hook, such as bf16, int4, powersgd:rank=2 or auto")
    option("--gather", metavar="SPEC", help="for models with fully_shard: how parameters are gathered, such as bf16")
    add_link(parser)
    option("--watch", action="store_true", help="print a line every second: step time, waiting, bytes and the hook")
    option("--metrics", type=Path, metavar="FILE", help="write the same to a file, for `gradwire watch FILE`")
    option(
        "--json",
        action="store_true",
        help="after the script's output, print what the hook has done as one line of JSON",
    )
    add_script(parser, required=True)


def run(args: argparse.Namespace) -> None:
    """Run the script and print what the hooks of its models have done."""
    how = {"gather": args.gather, "link": args.link, "metrics": args.metrics, "watch": args.watch}
    models = run_script(script_of(args), args.hook, **how, **ranks_of(args))
    if args.json:
        if models:  # under a launcher only rank 0 has any
            print(json_text({"models": models}, indent=None), flush=True)
        return
    for model in models:
        print(f"gradwire run: {_summary(model)}", file=sys.stderr)


def _summary(model: dict[str, Any]) -> str:
    if model["ranks"] == 1:
        return f"{model['hook']} had nothing to do, because the model's process group has one rank"
    if not model["total_steps"]:
        return f"{model['hook']} was registered, but no backward pass of the model has reached it"
    sent, wait = model["sent_bytes"] / 1e6, model["wait_s"] * 1e3
    why = f"; auto chose {model['reason']}" if model["reason"] else ""
    steps = f"{model['total_steps']} step{'' if model['total_steps'] == 1 else 's'}"
    return (
        f"{model['hook']} averaged {steps} on {model['ranks']} ranks; each rank sent {sent:.2f} MB per step and "
        f"waited {wait:.1f} ms for it{why}"
    )
