"""The command line: `gradwire <verb>`, one file a verb."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gradwire.cli import advise, bench, completion, demo, headroom, probe, report, run, simulate
from gradwire.errors import GradwireError, SpecError
from gradwire.version import __version__

VERBS = (demo, run, headroom, advise, probe, simulate, bench, report, completion)
EXAMPLES = """\
examples:
  gradwire demo                        does compression pay for a small GPT on 1 Gbit/s? in a minute or two
  gradwire demo --link 100mbit         the same on a slower link
  gradwire run --hook bf16 --nproc 2 train.py
                                       an unmodified DDP script under a hook
  gradwire headroom --nproc 2 train.py how much faster any hook could make it
  gradwire advise --nproc 2 train.py   which hook to use, if any
  gradwire probe --link 1gbit          latency and bandwidth of each collective, speed of each codec
  gradwire simulate --ranks 8..1024    step times of every hook on more ranks than there are here
  gradwire bench --links none 1gbit    hooks x links x ranks, into records.jsonl
  gradwire report records.jsonl        the records as a page, with what to do
  gradwire demo --help                 all options of a verb
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. 0: done, 1: it failed, 2: it was not understood, 130: interrupted; a script's own is kept."""
    try:
        args = parser().parse_args(argv)
        args.run(args)
    except SystemExit as stop:  # argparse ends this way, after --help with 0
        return int(stop.code or 0)
    except SpecError as error:
        return _fail(error, 2)
    except GradwireError as error:
        return _fail(error, getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        gc.freeze()  # collecting what torch leaves takes half a second: time in which we should be gone
        return _fail("interrupted", 130)
    except BrokenPipeError:  # whoever read our output has gone; keep the interpreter from writing the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Every verb with its options."""
    top = Parser(
        prog="gradwire",
        description="Average gradients across ranks with fewer bytes on the wire.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"gradwire {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="<verb>", required=True)
    for verb in VERBS:
        verb.add(verbs)
    return top


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _fail(error: object, code: int) -> int:
    if str(error):  # else whatever failed has said so itself
        print(f"gradwire: {error}" if error == "interrupted" else f"gradwire: error: {error}", file=sys.stderr)
    return code
