"""Drop-in for torch's `post_localSGD_hook`: exact averages at first, then within a sub-group, or none.

From then on the ranks differ, so average their parameters from time to time: see `gradwire.optim.averaging`.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradwire._torch import GradBucket
from gradwire.ddp_comm_hooks._group import (
    EXACT,
    Log,
    average,
    check_bucket,
    group_or_world,
    pickled_group,
    usable_group,
)
from gradwire.ddp_comm_hooks.debugging_hooks import noop_hook
from gradwire.engine.agreement import texts_of
from gradwire.errors import SpecError, StateError
from gradwire.exchanges.bucket import Steps

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

logger = Log("post_localSGD_hook")


class PostLocalSGDState:
    """Which group averages gradients at which step. `torch.save` and `torch.load` take it; the groups stay behind.

    Args:
        process_group: Averages in the first `start_localSGD_iter` steps; None is the world.
        subgroup: Averages from then on. None is the ranks on this machine; as that needs a collective, all ranks of
            `process_group` must make the state together.
        start_localSGD_iter: The number of steps that average over `process_group`.
        post_local_gradient_allreduce: False: nothing averages after these steps, and every rank keeps its own,
            undivided gradient.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if not isinstance(start_localSGD_iter, int) or start_localSGD_iter < 0:
            raise SpecError(
                f"post_localSGD: start_localSGD_iter must be a whole number of at least 0, got {start_localSGD_iter!r}"
            )
        for name, group in (("process_group", process_group), ("subgroup", subgroup)):
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise SpecError(f"post_localSGD: {name} must be a process group that this rank is in, got {group!r}")
        if subgroup is None and post_local_gradient_allreduce:
            subgroup = _ranks_of_this_machine(group_or_world(process_group))
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self._steps = Steps()
        logger.info("Local SGD will be started after %s iterations", start_localSGD_iter)

    @property
    def iter(self) -> int:
        """The number of steps that have begun."""
        return self._steps.count

    @iter.setter
    def iter(self, count: int) -> None:
        self._steps = Steps()
        self._steps.count = count

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step at its first bucket."""
        if self._steps.add(bucket.index()) and self.iter == self.start_localSGD_iter + 1:
            logger.info("Start to apply local SGD after %s iterations.", self.start_localSGD_iter)

    def state_dict(self) -> dict[str, int]:
        """The number of steps. Everything else is a setting."""
        return {"iter": self.iter}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the number of steps in `state`."""
        if not isinstance(state.get("iter"), int):
            raise StateError(f"not a state of post_localSGD: it needs a whole number 'iter', got {dict(state)}")
        self.iter = state["iter"]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the groups, which exist in this process only."""
        return {
            "process_group": pickled_group(self.process_group),
            "subgroup": pickled_group(self.subgroup),
            "start_localSGD_iter": self.start_localSGD_iter,
            "post_local_gradient_allreduce": self.post_local_gradient_allreduce,
            "iter": self.iter,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average exactly over the group that `state` names for this step, or return the rank's own gradient."""
    check_bucket(bucket, "post_localSGD_hook counts steps by their buckets", "allreduce_hook")
    state.maybe_increase_iter(bucket)
    if state.iter <= state.start_localSGD_iter:
        return average(EXACT, usable_group(state.process_group, "PostLocalSGDState.process_group"), bucket)
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    return average(EXACT, usable_group(state.subgroup, "PostLocalSGDState.subgroup"), bucket)


def _ranks_of_this_machine(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The members that torchrun started on the same node, or otherwise those with the same host name."""
    own = os.environ.get("GROUP_RANK", socket.gethostname())
    names = texts_of(group, own)
    ranks = dist.get_process_group_ranks(group)
    near = [rank for rank, name in zip(ranks, names, strict=True) if name == own]
    subgroup = group if near == ranks else dist.new_group(near, use_local_synchronization=True)
    assert isinstance(subgroup, dist.ProcessGroup)
    return subgroup
