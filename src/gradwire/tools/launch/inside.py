"""What gradwire does inside the processes of a run: it follows the plan at every DDP model, and notes failures."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch.ddp import comm_hook_of, guard_register_builtin
from gradwire.errors import RegisterError
from gradwire.tools.launch.plan import Notes, RunPlan

LOST = ("another rank failed", "Connection closed", "Connection reset", "Broken pipe", "gloo", "Timed out")
"""Texts of errors that only say that another rank is gone."""
SHARDED = ("run", "headroom", "advise", "compare")
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_register = DistributedDataParallel.register_comm_hook


def built(model: DistributedDataParallel) -> None:
    """Follow the plan of this process, if there is one, and keep the model's only hook slot for it."""
    plan = RunPlan.current()
    if plan is not None:
        _guard_slot(plan.verb)
        note_uncaught(plan)
        plan.follow(model)


def sharded(model: nn.Module) -> None:
    """The same for the root of a model with `fully_shard`, for the verbs that know what to do with one."""
    plan = RunPlan.current()
    if plan is not None and plan.verb in SHARDED:
        note_uncaught(plan)
        plan.follow(model)


def _guard_slot(verb: str) -> None:
    """Make DDP explain to a script that registers a hook of its own why it cannot."""

    def refuse(model: DistributedDataParallel, name: str) -> None:
        if comm_hook_of(model) is not None:
            raise RegisterError(
                f"`gradwire {verb}` has taken this model's hook, and DDP takes one hook for life, but the script "
                f"registers its own: {name}. Remove that line, or run the script without `gradwire {verb}`"
            )

    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        refuse(self, getattr(hook, "__qualname__", repr(hook)))
        _register(self, state, hook)

    setattr(DistributedDataParallel, "register_comm_hook", register_comm_hook)  # noqa: B010 - mypy
    guard_register_builtin(refuse)


# -- failures ----------------------------------------------------------------------------------------------------------


def note_failure(notes: Notes, error: BaseException, *, who: str | None = None, shown: bool = False) -> None:
    """Note the error that ends this process for the process that started it.

    `who` names this process; by default it is named by its rank. `shown`: the traceback is on stderr already.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    content = {"who": who or _who(), "traceback": text, "echo": is_echo(error), "shown": shown, "time_s": time.time()}
    notes.write(notes.new_note("failed"), content)


def is_echo(error: BaseException) -> bool:
    """Whether this error only says that another rank is gone. DDP turns errors of a hook into RuntimeError."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST)


def note_uncaught(plan: RunPlan) -> None:
    """From now on note the error that ends this process, if the script has started it by itself.

    Such a process shows its traceback as always, except for errors that only say that another rank is gone.
    """
    if not isinstance(sys.excepthook, _Noting):
        sys.excepthook = _Noting(plan, sys.excepthook)


class _Noting:
    """A `sys.excepthook` that notes the error and then calls another one."""

    def __init__(self, plan: RunPlan, show: ExceptHook) -> None:
        self._plan, self._show = plan, show

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):  # the process that started everything reports it, once
            return
        note_failure(self._plan, error, shown=not is_echo(error))
        if not is_echo(error):
            self._show(kind, error, frames)


def _who() -> str:
    """Lightning's ranks have no RANK in their environment, but they have a process group."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else os.environ.get("RANK")
    return "the script" if rank is None else f"rank {rank}"
