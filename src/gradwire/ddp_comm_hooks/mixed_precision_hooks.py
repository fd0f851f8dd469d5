"""Drop-in for torch's `mixed_precision_hooks`, which DDP registers for `DDP(..., mixed_precision=...)`.

The mean is divided before it is summed, so it is finite wherever the gradients are, and it is made beside the backward
pass instead of holding it up. DDP's first bucket of all after construction is empty memory; here it is filled again.

What does not run without an accelerator is DDP's own part: its constructor makes a `torch.Stream`, and its forward
records a `torch.Event` for each module. The hook itself runs anywhere: `upcast_stream` may be None. On an accelerator
it has not been run.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gradwire._torch import GradBucket
from gradwire._torch.ddp import drop_precision_hook, free_low_precision, is_ignored, use_full_precision
from gradwire.ddp_comm_hooks._group import EXACT, average
from gradwire.models.ddp import from_ddp
from gradwire.optim.in_backward import at_the_very_end

__all__: list[str] = []


@dataclass
class _AllreduceUpcastHookState:
    """What DDP's mixed precision needs in backward: the model, and a stream for casting up (None: the present one)."""

    ddp_weakref: Any
    upcast_stream: Any
    wait_for_stream_enqueued: bool = False


def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean in the model's `reduce_dtype`; then its parameters and gradients are in full precision again."""
    model = hook_state.ddp_weakref()
    _fill(bucket)
    if model.mixed_precision.param_dtype != model.mixed_precision.reduce_dtype:
        bucket.set_buffer(bucket.buffer().to(model.mixed_precision.reduce_dtype))
    if not hook_state.wait_for_stream_enqueued:
        hook_state.wait_for_stream_enqueued = True
        at_the_very_end(lambda: _end_backward(hook_state, model))

    def upcast(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        with hook_state.upcast_stream or nullcontext():
            mean = done.value()
            for param in bucket.parameters():
                _restore(param)
        return mean

    return average(EXACT, model.process_group, bucket).then(upcast)


def _fill(bucket: GradBucket) -> None:
    """Copy the gradients in once more: DDP gives a model in mixed precision new buckets, and fills the old ones."""
    whole = from_ddp(bucket, lambda _: "")
    with torch.no_grad():
        for param, part in zip(whole.params, whole.grads, strict=True):
            if param.grad is None:
                part.zero_()
            else:
                part.copy_(param.grad)


def _restore(param: Any) -> None:
    """Full precision for a parameter whose gradient is complete; its 16-bit copy is made anew in the next forward."""
    use_full_precision(param)
    free_low_precision(param)
    _match_grad(param)


def _match_grad(param: Any) -> None:
    if param.grad is not None and param.grad.dtype != param.dtype:
        param.grad.data = param.grad.to(param.dtype)


def _end_backward(hook_state: _AllreduceUpcastHookState, model: Any) -> None:
    """Wait for the casts, drop the hooks that the next forward makes anew, and restore what has no gradient."""
    hook_state.wait_for_stream_enqueued = False
    if hook_state.upcast_stream is not None:
        torch.accelerator.current_stream().wait_stream(hook_state.upcast_stream)
    for param in model.module.parameters():
        drop_precision_hook(param)
        if not param.requires_grad and not is_ignored(param):
            use_full_precision(param)
        _match_grad(param)
