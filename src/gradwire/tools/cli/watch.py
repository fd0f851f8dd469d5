"""`gradwire watch`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from gradwire.tools.cli.arguments import add_verb
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.live import page, recent, show

DESCRIPTION = """\
Show what a hook does while the model trains: step time, exposed waiting, bytes and the current hook. The file is that
of gradwire.metrics.JSONL or of `gradwire run --metrics FILE`; it may still grow, or not be there yet. End it with
Ctrl-C. On a terminal there is a table that is redrawn; elsewhere there is a line for each record.
"""
EXAMPLES = """\
gradwire run --hook int8 --metrics run.jsonl --nproc 2 train.py    in one terminal
gradwire watch run.jsonl                                           in another one
gradwire watch run.jsonl --once                                    what there is now
"""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "watch", line, DESCRIPTION, EXAMPLES)
    parser.add_argument("metrics", type=Path, help="file of metrics")
    parser.add_argument("--once", action="store_true", help="print the table once, and exit")
    parser.add_argument("--json", action="store_true", help="print the last record as JSON, and exit")


def run(args: argparse.Namespace) -> None:
    """Show the file."""
    if args.json:
        print(json_text(recent(args.metrics)[-1].as_dict()), flush=True)
    elif args.once:
        print(page(recent(args.metrics)), flush=True)
    else:
        show(args.metrics, sys.stdout)
