"""What verbs share: how they are declared, and the arguments of those that run a user's script."""

import argparse
import contextlib
import math
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO

from gradwire.tools.launch.script import Script

HELP_WIDTH = 100
TORCHRUN = {
    "--nnodes": "N",
    "--node-rank": "N",
    "--master-addr": "HOST",
    "--master-port": "PORT",
    "--rdzv-backend": "NAME",
    "--rdzv-endpoint": "HOST:PORT",
    "--rdzv-id": "ID",
    "--rdzv-conf": "K=V,...",
    "--max-restarts": "N",
    "--local-addr": "HOST",
}
"""Options that are passed on to torchrun, with the names of their values."""


def add_verb(verbs: Any, name: str, line: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Declare a verb with a line for the list of verbs, and a description and examples for its help."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=line,
        description=textwrap.fill(description, HELP_WIDTH),
        epilog=f"examples:\n{textwrap.indent(examples, '  ')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_link(parser: argparse.ArgumentParser) -> None:
    """The option `--link`."""
    parser.add_argument("--link", metavar="LINK", help="emulate a slower link, such as 100mbit,latency=5ms")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def error_limit(text: str, *, finite: bool = False) -> float:
    """The type of `--max-error`: a number above 0; `inf` means no limit, unless it must be `finite`."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0 or (finite and limit == math.inf):
        allowed = "above 0 and finite" if finite else "above 0, or inf for no limit"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
    return limit


def add_script(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the arguments. Everything after the script belongs to the script."""
    parser.add_argument(
        "--nproc",
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="start N ranks on this machine, as torchrun does; without this option the script runs once, for scripts "
        "that start their ranks themselves (mp.spawn, Lightning) and under torchrun ... -m gradwire.run",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module name, as for python -m")
    group = parser.add_argument_group(
        "torchrun options",
        "These are passed on to torchrun, which then starts the ranks: use them for several machines.",
    )
    for option, value in TORCHRUN.items():
        group.add_argument(option, metavar=value)
    group.add_argument("--standalone", action="store_true", help="start the ranks with torchrun on one machine")
    for option in ("--nproc-per-node", *TORCHRUN):  # torchrun takes both spellings
        if (other := f"--{option[2:].replace('-', '_')}") != option:
            dest = "nproc" if option == "--nproc-per-node" else other[2:]
            parser.add_argument(other, dest=dest, type=int if dest == "nproc" else str, help=argparse.SUPPRESS)
    parser.add_argument(
        "script", nargs=None if required else "?", help="a Python file that trains with DDP or fully_shard"
    )
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # else argparse asks for them if the script is missing


def script_of(args: argparse.Namespace) -> Script:
    """The requested script. SpecError if there is no such file."""
    return Script.parse([args.script, *args.args], module=args.module)


def ranks_of(args: argparse.Namespace) -> dict[str, Any]:
    """How to start its ranks, as arguments of `launch`."""
    given = ((option, getattr(args, option[2:].replace("-", "_"))) for option in TORCHRUN)
    torchrun = [f"{option}={value}" for option, value in given if value is not None]
    return {"nproc": args.nproc, "torchrun": [*torchrun, *(["--standalone"] if args.standalone else [])]}


@contextlib.contextmanager
def results_to(*, alone: bool) -> Iterator[TextIO]:
    """The stream for results. With `alone` it has nothing else: the output of the script goes to stderr."""
    if not alone:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(os.dup(kept), "w", encoding="utf-8") as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
