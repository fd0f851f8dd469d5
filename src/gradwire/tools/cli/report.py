"""`gradwire report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gradwire.tools.report.write import PAGE, STDOUT, check_page, check_writable, report

EXAMPLES = """\
examples:
  gradwire report records.jsonl
  gradwire report records.jsonl --out today.html
  gradwire report records.jsonl --format md
"""


def add(verbs: Any, line: str) -> None:
    """The verb, in a line, and its options."""
    parser = verbs.add_parser(
        "report",
        help=line,
        description="Turn the records of `gradwire bench` into one HTML page that needs nothing else, or into\n"
        "markdown for a pull request; and say which hook to take, or none.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("records", type=Path, help="file of records")
    parser.add_argument(
        "--out", type=Path, help=f"file to write, - for stdout (default: {PAGE} for html, stdout for md)"
    )
    parser.add_argument("--format", choices=("html", "md"), default="html", help="(default: %(default)s)")
    parser.add_argument(
        "--json", action="store_true", help="print advice and path as JSON; the page is written all the same"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    if args.out is not None and args.out != STDOUT:
        check_page(args.out) if args.format == "html" else check_writable(args.out)
    report(args.records, args.out, kind=args.format, as_json=args.json, out=sys.stdout, err=sys.stderr)
