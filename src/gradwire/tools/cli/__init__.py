"""The command line: `gradwire <verb>`, with one file per verb.

Importing this package is fast, and a verb is imported within `main`: torch takes seconds to load, and Ctrl-C meanwhile
must end without a traceback. `--help` and `--version` do not load torch.
"""

import argparse
import contextlib
import errno
import gc
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

from gradwire.errors import GradwireError, SpecError
from gradwire.version import __version__

VERBS = {
    "demo": "show whether compression pays for a small GPT on a slow link, and write a page",
    "run": "run an unmodified DDP script under a hook",
    "watch": "show what a hook does while the model trains, from its metrics file",
    "headroom": "measure the time that communication costs, which is the most a hook can save",
    "advise": "recommend a hook for this model on this network, or none",
    "compare": "run a script under several hooks with the same seeds, and report whether one harms the training",
    "probe": "measure latency and bandwidth between the ranks, and the speed of the codecs",
    "simulate": "predict the step time of every hook on more ranks than this machine has",
    "selfcheck": "check kernels, exchanges and training on this machine, and report step times",
    "bench": "train a small GPT under every hook, on several links and numbers of ranks, into a file of records",
    "report": "turn a file of records into a page, or into markdown",
    "store": "run the store that a training needs to continue when a rank fails",
    "completion": "print a completion script for a shell",
}
"""A line about each verb; in the module of the same name, `add` declares its options and `run` does what it says."""
EXAMPLES = """\
examples:
  gradwire demo                        does compression pay for a small GPT on 1 Gbit/s? (one to two minutes)
  gradwire demo --link 100mbit         the same on a slower link
  gradwire run --hook bf16 --nproc 2 train.py
                                       an unmodified DDP script under a hook
  gradwire watch run.jsonl             step time, waiting and bytes of a training that runs
  gradwire headroom --nproc 2 train.py how much faster a hook could make it at most
  gradwire advise --nproc 2 train.py   which hook to use, or none
  gradwire compare --hooks exact int4 --steps 300 --nproc 2 train.py
                                       does a hook harm the training?
  gradwire probe --link 1gbit          latency and bandwidth of each collective, speed of each codec
  gradwire simulate --ranks 8..1024    step times of every hook on more ranks than this machine has
  gradwire selfcheck --nproc 2         does it work on this machine? run it first on new hardware
  gradwire bench --links none 1gbit    every hook on two links, into records.jsonl
  gradwire report records.jsonl        the records as a page with a recommendation
  gradwire demo --help                 all options of a verb
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns 0: done, 1: failed, 2: wrong arguments, 130: interrupted; or the code of a script."""
    _take_any_text()
    try:
        args = _parsed(sys.argv[1:] if argv is None else argv)
        args.run(args)
    except SystemExit as stop:  # argparse ends this way, after --help with 0
        return int(stop.code or 0)
    except SpecError as error:
        return _fail(error, 2)
    except GradwireError as error:
        return _fail(error, getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        gc.freeze()  # garbage collection at exit would take half a second
        return _fail("interrupted", 130)
    except OSError as error:  # the reader of the output has gone, or the disk is full
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tries to write the rest
        return 1 if error.errno == errno.EPIPE else _fail(f"cannot write: {error.strerror}", 1)
    return 0


def _take_any_text() -> None:
    """Print a question mark for a character that the terminal's encoding does not have, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr escapes such characters by itself
        sys.stdout.reconfigure(errors="replace")


def parser(loaded: Collection[str] = VERBS) -> argparse.ArgumentParser:
    """The parser of all verbs. Those in `loaded` have their options, for which their modules are imported."""
    top = Parser(
        prog="gradwire",
        description="Average gradients across ranks with fewer bytes on the wire.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.set_defaults(all_verbs=parser)
    top.add_argument("--version", action="version", version=f"gradwire {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="<verb>", required=True)
    for verb, line in VERBS.items():
        if verb in loaded:
            module = importlib.import_module(f"gradwire.tools.cli.{verb}")
            module.add(verbs, line)
            verbs.choices[verb].set_defaults(run=module.run)
        else:
            verbs.add_parser(verb, help=line)
        verbs.choices[verb].set_defaults(parser=verbs.choices[verb])
    return top


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Only the verb that it names is imported."""
    verb = [word for word in words if word in VERBS][:1]
    with _ended_by_ctrl_c():
        top = parser(verb)
    args, unknown = top.parse_known_args(words)
    if unknown:  # the verb's own parser names the right --help
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """While modules load, exit at Ctrl-C: numpy and torch turn KeyboardInterrupt into other errors, or ignore it."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_fail("interrupted", 130)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _fail(error: object, code: int) -> int:
    if str(error):  # else the error has been shown already
        print(f"gradwire: {error}" if error == "interrupted" else f"gradwire: error: {error}", file=sys.stderr)
    return code
