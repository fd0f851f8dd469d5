"""`gradwire selfcheck`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from gradwire.tools.cli.arguments import add_json, add_verb
from gradwire.tools.measure.selfcheck import SelfcheckFailed, selfcheck
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.progress import progress
from gradwire.tools.report.selfcheck import to_html, to_text
from gradwire.tools.report.write import check_page, save

DESCRIPTION = """\
Check on this machine that every kernel gives the same bits as the reference, that every exchange averages correctly,
and that a model trains under every hook; and report how long a step takes. It starts local processes, or uses those
that torchrun has started. It exits with 1 if a result is wrong. Run it first on new hardware, and paste its output into
an issue.
"""
EXAMPLES = """\
gradwire selfcheck                                     2 local processes on the accelerator, or on the CPU
gradwire selfcheck --nproc 8 --device cuda --report selfcheck.html
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m gradwire selfcheck --json
gradwire selfcheck --hooks int8 int4:block=32
"""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "selfcheck", line, DESCRIPTION, EXAMPLES)
    parser.add_argument("--nproc", type=int, default=2, help="number of local processes (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda or testdev (default: the accelerator, or cpu if there is none)")
    parser.add_argument("--hooks", nargs="+", default=[], metavar="SPEC", help="hooks to check (default: all)")
    parser.add_argument("--report", type=Path, metavar="PATH", help="write a page, such as selfcheck.html")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check and print the table, on rank 0 only. SelfcheckFailed if something is wrong."""
    if args.report is not None:
        check_page(args.report)
    with progress(sys.stderr, "gradwire selfcheck") as report:
        result, passed = selfcheck(device=args.device, nproc=args.nproc, hooks=args.hooks, report=report)
    if result is not None:
        if args.report is not None:
            save(args.report, to_html(result))
        print(json_text(result) if args.json else to_text(result), flush=True)
    if not passed:
        raise SelfcheckFailed("" if result is None else "selfcheck: the results above are not all right")
