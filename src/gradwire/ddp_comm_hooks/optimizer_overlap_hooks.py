"""Drop-in for torch's `optimizer_overlap_hooks`: step parameters as soon as their bucket is averaged, on CPU too.

The optimizer gets the value of the hook's future, with the shape, strides and type of the parameter, whether or not the
hook wrote it into the bucket. A parameter that no rank used is not stepped. In new code prefer
`gradwire.optim.step_in_backward`, which does the same with one ordinary optimizer, its schedulers and checkpoints.

As in torch, a state of None means the world for hooks that only know a group: pass the group if the model has its own.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

import dataclasses
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch import GradBucket
from gradwire._torch.ddp import averaged_params, skip_late_registration
from gradwire._torch.optim import at_the_very_end, has_optimizers_in_backward, step_in_backward
from gradwire.ddp_comm_hooks._group import EXACT, AnyHook, average, check_bucket, grads_in, hook_of
from gradwire.errors import RegisterError
from gradwire.exchanges.base import Comm
from gradwire.models.ddp import from_ddp
from gradwire.optim.in_backward import in_backward

__all__: list[str] = []

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_FUNCTIONAL_OPTIM_STEP_METHOD_NAME = "step_param"


class _OptimizerHookState:
    """An object with `step_param(param, grad)`, and the parameters that it steps; None: all."""

    __slots__ = ["functional_optimizer", "params_to_optimize"]

    def __init__(self, functional_optim: Any, params: Iterable[torch.Tensor] | None = None) -> None:
        if not hasattr(functional_optim, _FUNCTIONAL_OPTIM_STEP_METHOD_NAME):
            raise ValueError(
                f"Class {type(functional_optim)} must implement method {_FUNCTIONAL_OPTIM_STEP_METHOD_NAME}."
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)

    def step(self, pairs: Pairs) -> None:
        """Step those parameters that belong to this optimizer."""
        for param, grad in pairs:
            if self.params_to_optimize is None or param in self.params_to_optimize:
                self.functional_optimizer.step_param(param, grad)


@dataclass
class _OptimInBackwardHookState:
    """The state of one backward pass. The engine uses its own stream if the device needs one."""

    optim_stream: torch.Stream | None
    wait_for_optim_stream_enqueued: bool
    unused: Pairs = dataclasses.field(default_factory=list)
    """Parameters that this rank did not use, with their average."""


def _hook_then_optimizer(hook: AnyHook, optimizer_state: _OptimizerHookState) -> AnyHook:
    """A hook that runs `hook`, then steps the bucket's parameters with its result."""

    def hook_then_optimizer_wrapper(hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        check_bucket(bucket, "stepping an optimizer in the hook needs buckets", "optimizer.step() after backward")
        unused = {param for param in bucket.parameters() if param.grad is None and in_backward()}

        def optimizer_step(done: torch.futures.Future[Any]) -> torch.Tensor:
            mean = _tensor(done.value())
            optimizer_state.step([(param, grad) for param, grad in _grads(bucket, mean) if param not in unused])
            return mean

        def step_unused() -> None:
            """DDP has set their gradient by now if another rank used them."""
            optimizer_state.step([(param, param.grad) for param in unused if param.grad is not None])

        if unused:
            at_the_very_end(step_unused)
        return hook(hook_state, bucket).then(optimizer_step)

    return hook_then_optimizer_wrapper


def _apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> AnyHook:
    """A hook that averages over the model's group and steps the optimizers of `_apply_optimizer_in_backward`.

    Its state is a weak reference to the model. At the end of backward it sets the gradients of these parameters to
    None.
    """
    state = _OptimInBackwardHookState(None, wait_for_optim_stream_enqueued=False)

    def apply_optim_in_backward_hook(hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        check_bucket(bucket, "stepping optimizers in the hook needs buckets", "optimizer.step() after backward")
        if not in_backward():
            raise RegisterError("optimizers in backward do not work under Join: a joined rank runs no backward")
        model: DistributedDataParallel = hook_state()
        unused = {param for param in bucket.parameters() if model.find_unused_parameters and param.grad is None}
        if not state.wait_for_optim_stream_enqueued:
            state.wait_for_optim_stream_enqueued = True
            at_the_very_end(lambda: _end_backward(state, model))

        def step(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            for param, grad in _grads(bucket, done.value()):
                if param in unused:
                    state.unused.append((param, grad))
                else:
                    _use(param, grad, is_view=gradient_is_bucket_view)
            return done.value()

        return average(EXACT, model.process_group, bucket).then(step)

    return apply_optim_in_backward_hook


def register_optim_in_backward(model: DistributedDataParallel) -> None:
    """Register the hook above on a model whose parameters have optimizers from `_apply_optimizer_in_backward`.

    DDP would otherwise register torch's hook in the first forward, so call this before.
    """
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles

    params = averaged_params(model)
    if not any(has_optimizers_in_backward(param) for param in params):
        raise RegisterError("no parameter has an optimizer in backward: call _apply_optimizer_in_backward first")
    for param in params:
        for handle in handles.get(param, []):
            handle.remove()
    model.register_comm_hook(weakref.ref(model), _apply_optim_in_backward_hook(model.gradient_as_bucket_view))
    skip_late_registration(model)  # otherwise DDP would register torch's hook


def _use(param: Any, grad: torch.Tensor, *, is_view: bool) -> None:
    """Step the parameter's optimizers with `grad`; a parameter without an optimizer gets it as its gradient.

    With `is_view` its gradient is `grad` already. DDP itself writes no gradients if a model has such optimizers.
    """
    if has_optimizers_in_backward(param):
        if not is_view:
            param.grad = grad
        step_in_backward(param)
    elif param.grad is None:
        param.grad = grad.clone()
    elif not is_view:
        param.grad.copy_(grad)


def _end_backward(state: _OptimInBackwardHookState, model: DistributedDataParallel) -> None:
    """Step the parameters that only other ranks used, and free the gradients."""
    unused, state.unused, state.wait_for_optim_stream_enqueued = state.unused, [], False
    if model.find_unused_parameters:
        used = _used_anywhere(model)
        for param, grad in unused:
            if param in used:
                _use(param, grad, is_view=False)
    for param in averaged_params(model):
        if has_optimizers_in_backward(param):
            param.grad = None


def _used_anywhere(model: DistributedDataParallel) -> set[torch.Tensor]:
    """The parameters for which at least one rank has a gradient. DDP knows them, but does not expose them."""
    params = averaged_params(model)
    flags = torch.tensor([float(param.grad is not None) for param in params], device=params[0].device)

    def count(comm: Comm) -> None:
        comm.all_reduce_(flags)

    hook_of(EXACT, model.process_group, flags.device).run(count)
    return {param for param, flag in zip(params, flags.tolist(), strict=True) if flag}


def _grads(bucket: GradBucket, mean: torch.Tensor) -> Pairs:
    """The bucket's parameters with their parts of `mean`."""
    ours = from_ddp(bucket, lambda _: "")
    return list(zip(ours.params, grads_in(ours, mean), strict=True))


def _tensor(value: Any) -> torch.Tensor:
    """The value of a future: DDP accepts a tensor, or a list that holds one."""
    return value if isinstance(value, torch.Tensor) else value[0]
