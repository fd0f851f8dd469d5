"""Drop-in for torch's `ddp_zero_hook`: the step of a `ZeroRedundancyOptimizer` beside the backward pass.

It works on every backend, gloo included: no collective is issued from a callback, so their order cannot differ between
ranks.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch import GradBucket
from gradwire._torch.ddp import comm_hook_of
from gradwire._torch.optim import has_optimizers_in_backward, zero_has_started, zero_overlaps, zero_params
from gradwire.ddp_comm_hooks._group import AnyHook, check_bucket
from gradwire.ddp_comm_hooks._zero import ZeroStep
from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges.bucket import Bucket
from gradwire.models.ddp import from_ddp

if TYPE_CHECKING:  # importing torch's optimizers warns and takes a second; callers have done that already
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: AnyHook, ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer", shard_buckets: bool = False
) -> AnyHook:
    """A hook that averages with `hook` and steps `zero` once the last gradient is computed, while others still travel.

    All ranks of the model's group call this together, then `ddp.register_comm_hook(state, result)`. When `backward`
    returns, all parameters are updated and the same on all ranks; do not call `zero.step()`. The first two backward
    passes (three with `static_graph`) update nothing, because DDP's buckets are not final.

    Args:
        hook: Averages a bucket.
        ddp: The model.
        zero: Its optimizer, made with `overlap_with_ddp=True`.
        shard_buckets: Share the parameters of a bucket among the ranks evenly; otherwise one rank owns a bucket.
    """
    step, average = ZeroStep(_checked(hook, ddp, zero), zero, shard_buckets, "hook_with_zero_step"), _bound(hook, ddp)
    waiting: list[tuple[Bucket, Future[torch.Tensor]]] = []

    def hook_with_zero_fn(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        ours, mean = average(state, bucket)
        if not step.ready(ours):
            return mean
        waiting.append((ours, mean))
        if not ours.is_last:
            return mean
        pairs = waiting.copy()
        waiting.clear()
        return step.submit(pairs)

    return hook_with_zero_fn


def hook_with_zero_step_interleaved(
    hook: AnyHook, ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer", shard_buckets: bool = False
) -> AnyHook:
    """Like `hook_with_zero_step`, but each bucket is stepped as soon as it is averaged, during the backward pass.

    The rest of the backward pass must not read a parameter once its gradient is computed. Autograd's own functions
    check that and raise an error.
    """
    step = ZeroStep(_checked(hook, ddp, zero), zero, shard_buckets, "hook_with_zero_step_interleaved")
    average = _bound(hook, ddp)

    def hook_with_zero_interleaved_fn(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        ours, mean = average(state, bucket)
        return step.submit([(ours, mean)]) if step.ready(ours) else mean

    return hook_with_zero_interleaved_fn


def _bound(
    hook: AnyHook, ddp: DistributedDataParallel
) -> Callable[[Any, GradBucket], tuple[Bucket, Future[torch.Tensor]]]:
    """`hook` as a function that also returns the bucket. A state of None is the model's group for our own hooks."""
    group = ddp.process_group
    knows_none = getattr(hook, "__module__", "").startswith("gradwire.ddp_comm_hooks.")

    def average(state: Any, bucket: GradBucket) -> tuple[Bucket, Future[torch.Tensor]]:
        check_bucket(bucket, "a ZeRO step needs buckets", "zero.step() after backward")
        ours = from_ddp(bucket, lambda param: "")
        return ours, hook(group if state is None and knows_none else state, bucket)

    return average


def _checked(hook: Any, ddp: Any, zero: Any) -> DistributedDataParallel:
    """Return the model; raise an error unless hook, model and optimizer fit together."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not callable(hook):
        raise SpecError(f"hook must be a function of (state, bucket) that averages, got {hook!r}")
    if not isinstance(ddp, DistributedDataParallel):
        raise RegisterError(f"ddp must be a DistributedDataParallel, got {type(ddp).__name__}; wrap the model first")
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise RegisterError(f"zero must be a ZeroRedundancyOptimizer, got {type(zero).__name__}")
    _check_optimizer(zero)
    _check_model(ddp)
    _check_fit(ddp, zero)
    return ddp


def _check_optimizer(zero: Any) -> None:
    if not zero_overlaps(zero):
        raise SpecError(
            "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook properly; "
            "without, register a plain hook and call zero.step() after backward"
        )
    if len(zero.param_groups) != 1:
        raise SpecError(
            f"a ZeroRedundancyOptimizer stepped by a hook has one parameter group, got {len(zero.param_groups)}; make "
            "it without overlap_with_ddp and call zero.step() after backward"
        )
    if zero_has_started(zero):
        raise RegisterError("this ZeroRedundancyOptimizer is already stepped by a hook; make a new one")


def _check_model(ddp: DistributedDataParallel) -> None:
    if (hooked := comm_hook_of(ddp)) is not None:
        name = getattr(hooked[0], "__qualname__", "?")
        raise RegisterError(
            f"this model already has the hook {name!r}, and DDP cannot replace a hook; wrap the module in a new "
            "DistributedDataParallel"
        )
    if ddp.find_unused_parameters and not ddp.static_graph:
        raise RegisterError(
            "with find_unused_parameters=True a hook cannot tell which parameters have no gradient, and would step "
            "them; use static_graph=True if they are the same in every step, or step after backward: zero.step()"
        )
    if any(has_optimizers_in_backward(param) for param in ddp.module.parameters()):
        raise RegisterError("this model is already stepped by _apply_optimizer_in_backward; use one of the two")


def _check_fit(ddp: DistributedDataParallel, zero: Any) -> None:
    model, steps = (dist.get_process_group_ranks(group) for group in (ddp.process_group, zero.process_group))
    if model != steps:
        raise RegisterError(
            f"the model averages over the ranks {model}, the optimizer uses the ranks {steps}; give both the same "
            "process_group"
        )
    named = {param: name for name, param in ddp.module.named_parameters()}
    averaged = {param for param, name in named.items() if param.requires_grad and name not in ddp.parameters_to_ignore}
    stepped = {param for param in zero_params(zero) if param.requires_grad}
    if left_out := [named[param] for param in averaged - stepped]:
        raise RegisterError(f"the optimizer does not have these parameters of the model: {', '.join(sorted(left_out))}")
    if others := [named.get(param, f"one of shape {tuple(param.shape)}") for param in stepped - averaged]:
        raise RegisterError(
            f"these parameters of the optimizer are in no bucket of the model, and would never be stepped: "
            f"{', '.join(sorted(others))}; give them to another optimizer"
        )
