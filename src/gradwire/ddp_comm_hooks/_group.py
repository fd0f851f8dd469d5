"""What the drop-in hooks share: averaging over a process group without a model, states in files, and messages.

A hook knows its process group but not the model. One engine serves all models that use an exchange on a group; it is
made for the first bucket.
"""

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.engine.hook import Hook
from gradwire.errors import RegisterError
from gradwire.exchanges import Exact, Exchange
from gradwire.exchanges.bucket import Bucket
from gradwire.models.checks import check_group
from gradwire.models.compiled import traced_mean
from gradwire.models.ddp import from_ddp, make_hook

TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
EXACT = Exact()

_hooks: "weakref.WeakKeyDictionary[Any, dict[Exchange, Hook]]" = weakref.WeakKeyDictionary()


def average(exchange: Exchange, group: dist.ProcessGroup | None, bucket: Any) -> Future[Tensor]:
    """Average a `GradBucket`, or the `(gradient, parameter)` pair that DDP's compiled reducer passes.

    Args:
        exchange: Made before the call, because `torch.compile` traces this function and cannot trace the making of one.
        group: The ranks; None is the world, as there is no model to ask.
        bucket: All ranks of the group must call this for the same buckets in the same order.
    """
    if isinstance(bucket, tuple):
        return traced_mean(exchange, group_or_world(group), *bucket)  # type: ignore[no-any-return]
    names = {param: f"{bucket.index()}.{position}" for position, param in enumerate(bucket.parameters())}
    return mean_of(exchange, group, from_ddp(bucket, names.__getitem__))


def mean_of(exchange: Exchange, group: dist.ProcessGroup | None, bucket: Bucket) -> Future[Tensor]:
    """Average a bucket on the engine of its group."""
    hook = hook_of(exchange, group_or_world(group), bucket.flat.device)
    hook.begin(bucket)
    hook.layouts.clear()  # the engine outlives the models that it serves
    return hook.mean(bucket)


def hook_of(exchange: Exchange, group: dist.ProcessGroup, device: torch.device) -> Hook:
    """The engine for all models of this process that use `exchange` on `group`."""
    hooks = _hooks.setdefault(group, {})
    if exchange not in hooks or hooks[exchange].closed:
        hooks[exchange] = make_hook(exchange, group, device)
    return hooks[exchange]


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the world if it is None."""
    check_group(group)
    if group is not None:
        return group
    world = dist.group.WORLD
    if world is None:
        raise ValueError("Default process group has not been initialized, please call init_process_group().")
    return world


def check_bucket(bucket: Any, hook: str, instead: str) -> None:
    """Raise RegisterError for the `(gradient, parameter)` pair of DDP's compiled reducer.

    Args:
        bucket: What DDP passed to the hook.
        hook: The name of the hook, and why it needs buckets.
        instead: A hook or call that works under the compiled reducer.
    """
    if isinstance(bucket, tuple):
        raise RegisterError(
            f"{hook}, and DDP's compiled reducer passes single gradients; set torch._dynamo.config.optimize_ddp = "
            f"'ddp_optimizer' before building the model, or use {instead}"
        )


# -- states in files -------------------------------------------------------------------------------------------------

_LOST = "lost in pickling"


def pickled_group(group: dist.ProcessGroup | str | None) -> str | None:
    """What a file holds of a process group: None for the world, otherwise a note that there was another group."""
    return None if group is None or group is dist.group.WORLD else _LOST


def usable_group(group: dist.ProcessGroup | str | None, member: str) -> dist.ProcessGroup | None:
    """The group of a state; RegisterError if it was lost in a file, as any other group would average over other ranks.

    `member` is its name for the message, such as "PowerSGDState.process_group".
    """
    if isinstance(group, str):
        state, _, name = member.partition(".")
        raise RegisterError(f"a pickled {state} has lost its groups: set state.{name} before training")
    return group


class Log:
    """Logs to torch's logger of a module, which callers of torch's hooks filter by, and to gradwire's.

    Without logging set up only torch's is used: it has a handler of its own, and one line on stderr is enough.
    """

    def __init__(self, module: str) -> None:
        self._torch = logging.getLogger(f"{TORCH}.{module}")
        self._own = logging.getLogger(f"gradwire.ddp_comm_hooks.{module}")

    def info(self, message: str, *values: object) -> None:
        """Log progress."""
        self._log(logging.INFO, message, values)

    def warning(self, message: str, *values: object) -> None:
        """Log what the user should know."""
        self._log(logging.WARNING, message, values)

    def _log(self, level: int, message: str, values: tuple[object, ...]) -> None:
        self._torch.log(level, message, *values, stacklevel=3)
        if self._own.hasHandlers():
            self._own.log(level, message, *values, stacklevel=3)
