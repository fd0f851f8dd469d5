"""Private names of autograd's engine and of optimizers, ZeroRedundancyOptimizer among them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from torch.optim import Optimizer

NO_BACKWARD = -1
"""The identity of the backward pass of a thread that runs none."""

# -- the backward pass -----------------------------------------------------------------------------------------------


def backward_id() -> int:
    """A number that is different for each backward pass, of the one that this thread runs; or NO_BACKWARD."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(run: Callable[[], None]) -> None:
    """Call `run` when the backward pass of this thread ends, after what was queued before."""
    Variable._execution_engine.queue_callback(run)


def at_the_very_end(run: Callable[[], None]) -> None:
    """Call `run` when this backward pass ends, after DDP's own callback, which is queued later than ours."""
    at_end_of_backward(lambda: at_end_of_backward(run))


# -- optimizers ------------------------------------------------------------------------------------------------------


def has_optimizers_in_backward(param: Tensor) -> bool:
    """Whether torch's `_apply_optimizer_in_backward` has dealt with this parameter."""
    return hasattr(param, "_in_backward_optimizers")


def step_in_backward(param: Any) -> None:
    """Step the optimizers that `_apply_optimizer_in_backward` gave to this parameter."""
    for optimizer in param._in_backward_optimizers:
        optimizer.step()


def has_step_hooks(optimizer: object) -> bool:
    """Whether `register_step_post_hook` would work: wrappers that do not call Optimizer.__init__ have no hooks."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def drop_step_hooks(optimizer: Optimizer) -> None:
    """Let this object run no step hooks. The object that it was copied from keeps its own."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


def is_wrapped_by_scheduler(step: object) -> bool:
    """Whether this `step` is the one by which a learning-rate scheduler counts."""
    return hasattr(step, "_wrapped_by_lr_sched")


def replace_step(optimizer: Optimizer, finish: Callable[[Any, object], None], mark: str) -> Callable[[], None]:
    """Make `finish(optimizer, closure)` the step of this object, with torch's hooks around it; the result undoes it.

    The new step has an attribute `mark`. Learning-rate schedulers take it for one that they have wrapped, and see that
    it was called. A GradScaler leaves `found_inf` for it, as for optimizers that support scaling.
    """

    def step(self: Any, closure: object = None) -> None:
        self._opt_called = True
        finish(self, closure)

    names = ["step", "_step_supports_amp_scaling"]
    before = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = True
    setattr(hooked, mark, True)
    vars(optimizer).update(step=MethodType(hooked, optimizer), _step_supports_amp_scaling=True)

    def restore() -> None:
        for name in names:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)

    return restore


# -- ZeroRedundancyOptimizer -----------------------------------------------------------------------------------------


def zero_device(zero: Any) -> torch.device:
    """The device of the parameters."""
    device: torch.device = zero._default_device
    return device


def zero_params(zero: Any) -> list[Tensor]:
    """All parameters that were given to it, those of other ranks among them."""
    params: list[Tensor] = zero._all_params
    return params


def zero_overlaps(zero: Any) -> bool:
    """Whether it was made with `overlap_with_ddp=True`."""
    return bool(zero._overlap_with_ddp)


def zero_has_started(zero: Any) -> bool:
    """Whether a hook steps it already."""
    status = zero._overlap_info.status
    return bool(status != type(status).UNINITIALIZED)


def zero_step(zero: Any, grads: list[Tensor]) -> None:
    """Step the local optimizer with these gradients, one for each parameter of its group."""
    zero._local_step(grads)


def zero_start(
    zero: Any, buckets: Sequence[list[Tensor]], per_rank: list[list[Tensor]], owners: dict[Tensor, int]
) -> None:
    """Let it make its local optimizer, and leave its notes in the state that its other methods expect."""
    info = zero._overlap_info
    info.params_per_bucket, info.params_per_rank = list(buckets), per_rank
    info.assigned_ranks_per_bucket = [{owners[param] for param in params} for params in buckets]
    info.num_bucket_assignments = sum(map(len, info.assigned_ranks_per_bucket))
    zero._clear_cache()
    zero._partition_parameters(per_rank)
    zero._bucket_assignments_per_rank_cache = [
        {index: params for index, params in enumerate(buckets) if any(owners[param] == rank for param in params)}
        for rank in range(zero.world_size)
    ]
    world, zero.global_rank = zero.global_rank, zero.rank  # torch looks it up in a list over the ranks of the group
    try:
        zero._init_local_optimizer()
    finally:
        zero.global_rank = world
    info.status = type(info.status).INITIALIZED
