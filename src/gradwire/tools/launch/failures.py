"""What a process under a plan says about the error that ended it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from gradwire.tools.launch.local_rank import is_echo
from gradwire.tools.launch.plan import Plan

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def note_failure(plan: Plan, error: BaseException, *, shown: bool = False) -> None:
    """For whoever started this process: what went wrong, when, and whether it only echoes another rank's end.

    `shown`: the traceback is on stderr already.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    content = {"who": _who(), "traceback": text, "echo": is_echo(error), "shown": shown, "time_s": time.time()}
    plan.write(plan.new_note("failed"), content)


def note_uncaught(plan: Plan) -> None:
    """From now on note the error that ends this process, if it is one of those that the script starts by itself.

    Such a process shows its traceback as ever, but for errors that only say that another rank is gone.
    """
    if not isinstance(sys.excepthook, _Noting):
        sys.excepthook = _Noting(plan, sys.excepthook)


class _Noting:
    """A `sys.excepthook` before another."""

    def __init__(self, plan: Plan, show: ExceptHook) -> None:
        self._plan, self._show = plan, show

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):  # the process that everything began with says so, once
            return
        note_failure(self._plan, error, shown=not is_echo(error))
        if not is_echo(error):
            self._show(kind, error, frames)


def _who() -> str:
    """Lightning's ranks have no RANK in their environment, but a process group."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else os.environ.get("RANK")
    return "the script" if rank is None else f"rank {rank}"
