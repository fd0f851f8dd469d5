"""What the supervised processes execute: `python -m gradwire.tools.launch.rank WORDS`.

--call FOLDER RANK     calls the function that `FOLDER/order.json` names, within a process group
--torchrun OPTIONS     runs torchrun, which ends together with the process that started it
--fork-server MODULES  imports the modules, and forks processes that continue with the words they are given
[-m] script args       runs a user's script under the plan in the environment
"""

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradwire.tools.launch.forked import serve
from gradwire.tools.launch.inside import note_failure
from gradwire.tools.launch.plan import ORDER, PARENT, Notes, RunPlan, load
from gradwire.tools.launch.script import Script, run_under
from gradwire.tools.launch.supervise import RunFailed

PR_SET_PDEATHSIG = 1


def main() -> int:
    """The exit code. What went wrong is in a note."""
    kind, *words = sys.argv[1:] or [""]
    if kind == "--fork-server":
        end_with_parent(signal.SIGKILL)
        kind, *words = serve(words)
    if kind == "--torchrun":
        return _torchrun(words)
    end_with_parent(signal.SIGKILL)
    if kind == "--call":
        return _call(words[0], int(words[1]))
    plan = RunPlan.current()
    if plan is None:
        raise SystemExit("gradwire.tools.launch.rank is started by `gradwire run`, not by hand")
    return _script(plan, Script.parse(words if kind == "-m" else [kind, *words], module=kind == "-m"))


def _script(plan: RunPlan, script: Script) -> int:
    """Up to here Ctrl-C has ended this process; from here on the script may act on it, as in any Python process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_under(plan, script)
    except RunFailed as failed:
        gc.freeze()  # garbage collection at exit takes half a second, and after Ctrl-C there are two
        return failed.exit_code
    return 0


def _call(folder: str, rank: int) -> int:
    """Call the function of the order, and note its result or its error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the supervisor sends it to end this process
    notes, order = Notes(folder), json.loads(Path(folder, ORDER).read_text())
    code = 0
    try:
        notes.write(f"result-{rank}", _result(order, rank, notes))
    except BaseException as error:
        note_failure(notes, error, who=f"rank {rank}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # other ranks may never answer a destructor, and an interpreter takes seconds to end on a busy machine


def _result(order: Mapping[str, Any], rank: int, notes: Notes) -> Any:
    def report(part: float, doing: str) -> None:
        if rank == 0:
            notes.write("report-0", [part, doing])

    function = load(order["target"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{notes.folder}/store",
        rank=rank,
        world_size=order["size"],
        timeout=timedelta(seconds=order["timeout_s"]),
    )
    result = function(rank, order["size"], order["job"], report)
    dist.barrier()  # no rank closes its connections while another still works
    dist.destroy_process_group()
    return result


def _torchrun(options: list[str]) -> int:
    """torchrun itself ends its ranks at SIGTERM."""
    from torch.distributed.run import main as torchrun

    end_with_parent(signal.SIGTERM)
    sys.argv[0] = "torchrun"
    torchrun(options)
    return 0


def end_with_parent(how: signal.Signals) -> None:
    """Where the system can do it (Linux): get a signal when the process that started this one ends, however it ends."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != int(parent):
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
