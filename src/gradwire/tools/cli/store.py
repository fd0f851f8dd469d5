"""`gradwire store`."""

import argparse
import threading
from typing import Any

from gradwire._torch import TCPStore
from gradwire.errors import GradwireError, SpecError
from gradwire.tools.cli.arguments import add_verb

DESCRIPTION = """\
Run the store through which the ranks of a training with on_failure="shrink" agree on who takes part, until Ctrl-C. Run
it on a machine that stays up, as it must outlive the ranks. Anybody who reaches the port can write to it: keep it
inside the training network.
"""
EXAMPLES = """\
gradwire store --port 29400                     on one machine
GRADWIRE_STORE=HOST:29400 python train.py       for every rank, and again when a rank has failed
"""


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "store", line, DESCRIPTION, EXAMPLES)
    text = "port to listen on; 0 takes a free one (default: %(default)s)"
    parser.add_argument("--port", type=int, default=29400, help=text)


def run(args: argparse.Namespace) -> None:
    """Host it."""
    if not 0 <= args.port <= 65535:
        raise SpecError(f"--port must be between 0 and 65535, got {args.port}")
    try:
        store = TCPStore("localhost", args.port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise GradwireError(f"cannot host a store at port {args.port}: {str(error).splitlines()[0]}") from error
    print(f"the store is at port {store.port}; Ctrl-C ends it", flush=True)
    threading.Event().wait()
