"""Hooks that know a process group but no model: one engine a group and spec, made when first used."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.engine.hook import Hook
from gradwire.errors import RegisterError
from gradwire.exchanges import Exchange, exchange
from gradwire.exchanges.bucket import Bucket
from gradwire.models.checks import check_group
from gradwire.models.compiled import traced_mean
from gradwire.models.ddp import from_ddp, make_hook

_hooks: "weakref.WeakKeyDictionary[Any, dict[str | Exchange, Hook]]" = weakref.WeakKeyDictionary()


def averaged(spec: str | Exchange, group: dist.ProcessGroup | None, bucket: Any) -> Future[Tensor]:
    """Average a `GradBucket`, or the `(gradient, parameter)` pair that DDP's compiled reducer hands over.

    `None` is the world, as there is no model to ask. All ranks of the group must call this in the same order.
    """
    if isinstance(bucket, tuple):
        return traced_mean(exchange(spec), group_of(group), *bucket)  # type: ignore[no-any-return]
    names = {param: f"{bucket.index()}.{position}" for position, param in enumerate(bucket.parameters())}
    return mean_of(spec, group, from_ddp(bucket, names.__getitem__))


def mean_of(spec: str | Exchange, group: dist.ProcessGroup | None, bucket: Bucket) -> Future[Tensor]:
    """Average a bucket on the engine of its group."""
    hook = hook_of(spec, group_of(group), bucket.flat.device)
    hook.begin(bucket)
    hook.layouts.clear()  # an engine outlives the models it serves
    return hook.mean(bucket)


def hook_of(spec: str | Exchange, group: dist.ProcessGroup, device: torch.device) -> Hook:
    """The engine that serves all models of this process that use `spec` on `group`."""
    made = _hooks.setdefault(group, {})
    if spec not in made or made[spec].closed:
        made[spec] = make_hook(exchange(spec), group, device)
    return made[spec]


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the world."""
    check_group(group)
    if group is not None:
        return group
    world = dist.group.WORLD
    if world is None:
        raise ValueError("Default process group has not been initialized, please call init_process_group().")
    return world


_LOST = "lost in pickling"


def pickled(group: dist.ProcessGroup | str | None) -> str | None:
    """What a file can hold of a group: nothing of the world, and else that there was one."""
    return None if group is None or group is dist.group.WORLD else _LOST


def found(state: Any, name: str) -> dist.ProcessGroup | None:
    """The group that `state` has under this name, unless that was lost: to guess one would average over others."""
    group: dist.ProcessGroup | str | None = getattr(state, name)
    if isinstance(group, str):
        told = type(state).__name__
        raise RegisterError(f"a pickled {told} has lost its groups: set state.{name} before training")
    return group
