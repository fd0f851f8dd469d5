"""`gradwire report`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from gradwire.tools.cli.arguments import add_verb
from gradwire.tools.report.write import PAGE, STDOUT, check_page, check_writable, report

DESCRIPTION = """\
Turn the records of `gradwire bench` or the runs of `gradwire compare` into one self-contained HTML page, or into
markdown for a pull request, with a recommendation: which hook to use, or none.
"""
EXAMPLES = """\
gradwire report records.jsonl
gradwire report records.jsonl --out today.html
gradwire report records.jsonl --format md
"""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "report", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option("records", type=Path, help="file of records")
    option("--out", type=Path, help=f"file to write, - for stdout (default: {PAGE} for html, stdout for md)")
    option("--format", choices=("html", "md"), default="html", help="format of the report (default: %(default)s)")
    option(
        "--json", action="store_true", help="print the recommendation and the path as JSON; the page is written as well"
    )


def run(args: argparse.Namespace) -> None:
    """Write the report."""
    if args.out is not None and args.out != STDOUT:
        check_page(args.out) if args.format == "html" else check_writable(args.out)
    report(args.records, args.out, kind=args.format, as_json=args.json, out=sys.stdout, err=sys.stderr)
