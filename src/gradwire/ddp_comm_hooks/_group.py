"""What the drop-in hooks share: averaging over a process group without a model, states in files, and messages.

A hook knows its process group but not the model. One engine serves all models that use an exchange on a group; it is
made for the first bucket.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire._torch import GradBucket
from gradwire.engine.hook import Hook
from gradwire.errors import RegisterError
from gradwire.exchanges import Exact, Exchange
from gradwire.exchanges.bucket import Bucket
from gradwire.models.checks import check_group
from gradwire.models.compiled import traced_mean
from gradwire.models.ddp import from_ddp, make_hook

TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
EXACT = Exact()

AnyHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_hooks: "weakref.WeakKeyDictionary[Any, dict[tuple[Exchange, torch.device], Hook]]" = weakref.WeakKeyDictionary()


def average(exchange: Exchange, group: dist.ProcessGroup | None, bucket: Any) -> Future[Tensor]:
    """Average a `GradBucket`, or the `(gradient, parameter)` pair that DDP's compiled reducer passes.

    A group of None is the world. All ranks of the group must call this for the same buckets in the same order.
    `torch.compile` traces this function, and cannot trace how an exchange is made from a spec.
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
    """The engine for all models of this process that use `exchange` on `group`, and are on this device."""
    hooks, key = _hooks.setdefault(group, {}), (exchange, device)
    if key not in hooks or hooks[key].closed:
        hooks[key] = make_hook(exchange, group, device)
    return hooks[key]


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
    """Raise RegisterError for the pair of DDP's compiled reducer. `hook` says who needs buckets, and why."""
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


class Log(logging.LoggerAdapter[logging.Logger]):
    """Logs to torch's logger of a module, which callers of torch's hooks filter by, and to gradwire's.

    Where logging is not set up only torch's is used: it has its own handler, and one line on stderr is enough.
    """

    def __init__(self, module: str) -> None:
        super().__init__(logging.getLogger(f"{TORCH}.{module}"))
        self._own = logging.getLogger(f"gradwire.ddp_comm_hooks.{module}")

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """What `info` and `warning` call."""
        self.logger.log(level, msg, *args, **{"stacklevel": 3, **options})
        if self._own.hasHandlers():
            self._own.log(level, msg, *args, **{"stacklevel": 3, **options})
