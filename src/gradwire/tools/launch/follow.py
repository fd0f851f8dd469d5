"""follow(): run a script under a plan, in new processes or in this one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gradwire.tools.launch.launch import launch
from gradwire.tools.launch.plan import Plan
from gradwire.tools.launch.script import Script, ScriptFailed, run_under

ECHO_LATER_S = 60
"""An error that only echoes another rank's end is dated later by so much, as torchrun counts in whole seconds."""


def follow(
    plan: Plan, script: Script, nproc: int | None, torchrun: Sequence[str], enough: Callable[[], bool] = lambda: False
) -> None:
    """Run a script under a plan: here, where a launcher has started this process as a rank, else in new processes."""
    if is_rank(nproc, torchrun):
        try:
            run_under(plan, script)
        except ScriptFailed as failed:
            raise _for_torchrun(plan, failed) from None
    else:
        launch(script, plan, nproc=nproc, torchrun=torchrun, enough=enough)


def is_rank(nproc: int | None, torchrun: Sequence[str]) -> bool:
    """Whether a launcher has started this process as a rank, and no others are asked for."""
    return "RANK" in os.environ and nproc is None and not torchrun


def _for_torchrun(plan: Plan, failed: ScriptFailed) -> ScriptFailed:
    """torchrun shows the traceback of the rank that failed first, if it stands in a file: then once is enough."""
    path, notes = os.environ.get("TORCHELASTIC_ERROR_FILE"), plan.notes("failed")
    if not path or not notes:
        return failed
    text, when = notes[0]["traceback"], notes[0]["time_s"] + (ECHO_LATER_S if notes[0]["echo"] else 0)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(when))}}
    Path(path).write_text(json.dumps({"message": message}))
    return ScriptFailed("", failed.exit_code)
