"""One rank of a script: `python -m gradwire.tools.launch.rank [-m] script args`, under the plan in its environment."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

from gradwire.tools.launch.plan import PARENT, Plan
from gradwire.tools.launch.script import Script, ScriptFailed, run_under

PR_SET_PDEATHSIG = 1


def main() -> int:
    """The exit code. What went wrong stands in a note."""
    end_with_parent(signal.SIGKILL)
    words, plan = sys.argv[1:], Plan.current()
    module = words[0] == "-m"
    if plan is None:
        raise SystemExit("gradwire.tools.launch.rank is started by `gradwire run`, not by hand")
    _hear_ctrl_c()
    try:
        run_under(plan, Script.parse(words[module:], module=module))
    except ScriptFailed as failed:
        gc.freeze()  # collecting what torch leaves takes half a second, and after Ctrl-C there are two
        return failed.exit_code
    return 0


def _hear_ctrl_c() -> None:
    """Up to here it has ended this process; from here on the script may act on it, as in any Python process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with_parent(how: signal.Signals) -> None:
    """Where the system can (Linux): get a signal when the process that started this one ends, however it does."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != int(parent):
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
