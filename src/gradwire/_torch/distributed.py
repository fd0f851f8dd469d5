"""Private names of `torch.distributed`: process groups, their stores and the backends behind them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gradwire._torch import ProcessGroupGloo, Store


def store_of(group: dist.ProcessGroup) -> Store:
    """The store from which the members of `group` made it."""
    return distributed_c10d._get_process_group_store(group)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that moves tensors of `device`. It raises RuntimeError where the group has none."""
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of `group` may take, or torch's default where the backend does not say."""
    options = getattr(backend_of(group, device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout


def new_gloo(
    store: Store, rank: int, size: int, interfaces: Sequence[str], threads: int, timeout: timedelta
) -> ProcessGroupGloo:
    """A gloo group outside of `torch.distributed`'s list of groups, which works at `threads` collectives at a time."""
    made: Any = ProcessGroupGloo
    options = made._Options()
    options._devices = [made.create_device(interface=name) for name in interfaces] or [made.create_default_device()]
    options._threads, options._timeout = threads, timeout
    group: ProcessGroupGloo = made(store, rank, size, options)
    return group


def all_gather_base(group: Any, out: Tensor, tensor: Tensor) -> Any:
    """Start to gather (n,) of each rank into (size * n,), and return the work.

    Since torch 2.13 the method is called `all_gather_single` too; the earlier versions have this name only.
    """
    return group._allgather_base(out, tensor)
