"""Drop-in for torch's `post_localSGD_hook`: exact averages at first, then within a sub-group, or none.

From then on the ranks drift apart, so average their parameters now and then: see `gradwire.optim.averaging`.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradwire._torch import GradBucket
from gradwire.ddp_comm_hooks._group import averaged, found, group_of, pickled
from gradwire.ddp_comm_hooks.debugging_hooks import noop_hook
from gradwire.errors import RegisterError, SpecError, StateError

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

logger = logging.getLogger(__name__)


class PostLocalSGDState:
    """Which group averages gradients at which step.

    The first `start_localSGD_iter` steps: `process_group` (None: the world). Then `subgroup` (None: the ranks on this
    machine, found out here, so all ranks of `process_group` together), or with `post_local_gradient_allreduce=False`
    nobody: every rank keeps its own, undivided gradient. `iter` counts the steps that have begun.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if not isinstance(start_localSGD_iter, int) or start_localSGD_iter < 0:
            told = f"got {start_localSGD_iter!r}"
            raise SpecError(f"post_localSGD: start_localSGD_iter must be a whole number of at least 0, {told}")
        for name, group in (("process_group", process_group), ("subgroup", subgroup)):
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise SpecError(f"post_localSGD: {name} must be a process group that this rank is in, got {group!r}")
        if subgroup is None and post_local_gradient_allreduce:
            subgroup = _ranks_of_this_machine(group_of(process_group))
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        self._last_index = -1
        logger.info("Local SGD will be started after %s iterations", start_localSGD_iter)

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step at its first bucket: the last one may never come (`skip_all_reduce_unused_params`)."""
        if bucket.index() <= self._last_index or self._last_index < 0:
            self.iter += 1
            if self.iter == self.start_localSGD_iter + 1:
                logger.info("Start to apply local SGD after %s iterations.", self.start_localSGD_iter)
        self._last_index = -1 if bucket.is_last() else bucket.index()

    def state_dict(self) -> dict[str, int]:
        """The count. The rest are settings."""
        return {"iter": self.iter}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting."""
        if not isinstance(state.get("iter"), int):
            raise StateError(f"not a state of post_localSGD: it needs a whole number 'iter', got {dict(state)}")
        self.iter, self._last_index = state["iter"], -1

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the groups, which live in this process only."""
        groups = {name: pickled(getattr(self, name)) for name in ("process_group", "subgroup")}
        return {**self.__dict__, **groups, "_last_index": -1}


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over the group whose turn it is, exactly; or the rank's own gradient."""
    if not hasattr(bucket, "is_last"):
        raise RegisterError(
            "post_localSGD_hook cannot count steps under DDP's compiled reducer; do not compile DDP here"
        )
    state.maybe_increase_iter(bucket)
    if state.iter <= state.start_localSGD_iter:
        return averaged("exact", found(state, "process_group"), bucket)
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    return averaged("exact", found(state, "subgroup"), bucket)


def _ranks_of_this_machine(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The members that torchrun started on the same node, or else that say the same host name."""
    names: list[Any] = [None] * group.size()
    own = os.environ.get("GROUP_RANK", socket.gethostname())
    dist.all_gather_object(names, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    near = [rank for rank, name in zip(ranks, names, strict=True) if name == own]
    made = group if near == ranks else dist.new_group(near, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
