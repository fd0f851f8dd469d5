"""What happens when a script under a plan builds a DDP model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradwire._torch.ddp import comm_hook_of, guard_register_builtin
from gradwire.errors import RegisterError
from gradwire.tools.launch.failures import note_uncaught
from gradwire.tools.launch.plan import Plan
from gradwire.tools.launch.startup.sitecustomize import patch

_register = DistributedDataParallel.register_comm_hook


def watch_models() -> None:
    """From now on `built` is called with every DDP model of this process."""
    patch(DistributedDataParallel)


def built(model: DistributedDataParallel) -> None:
    """Follow the plan, if there is one, and keep the model's only hook slot for it."""
    plan = Plan.current()
    if plan is not None:
        _guard_slot(plan.verb)
        note_uncaught(plan)
        plan.follow(model)


def _guard_slot(verb: str) -> None:
    """Let a script that registers a hook of its own know why it cannot."""

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
