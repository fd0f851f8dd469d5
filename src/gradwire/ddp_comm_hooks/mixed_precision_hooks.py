"""Drop-in for torch's `mixed_precision_hooks`, which DDP registers for `DDP(..., mixed_precision=...)`.

Gradients are divided before they are summed, so the mean is finite if they are, and averaging overlaps with the
backward pass instead of blocking it. DDP passes uninitialised memory in the first iteration; the hook fills it.

DDP itself needs an accelerator for this: its constructor makes a `torch.Stream`, and its forward records a
`torch.Event` for each module. The hook runs anywhere, as `upcast_stream` may be None. It has not been run on an
accelerator.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gradwire._torch import GradBucket
from gradwire._torch.ddp import drop_precision_hook, free_low_precision, is_ignored, use_full_precision
from gradwire._torch.optim import at_the_very_end
from gradwire.ddp_comm_hooks._group import EXACT, average, check_bucket
from gradwire.models.ddp import from_ddp

__all__: list[str] = []


@dataclass
class _AllreduceUpcastHookState:
    """The model, and the stream on which gradients are cast to full precision (None: the current one)."""

    ddp_weakref: Any
    upcast_stream: Any
    wait_for_stream_enqueued: bool = False


def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in the model's `reduce_dtype`, then bring its parameters and gradients back to full precision."""
    check_bucket(bucket, "the hook of DDP's mixed_precision needs buckets", "torch.autocast")
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
    """Copy the gradients into the bucket: in the first iteration of mixed precision DDP fills discarded buckets."""
    whole = from_ddp(bucket, lambda _: "")
    with torch.no_grad():
        for param, part in zip(whole.params, whole.grads, strict=True):
            if param.grad is None:
                part.zero_()
            else:
                part.copy_(param.grad)


def _restore(param: Any) -> None:
    """Full precision for a parameter whose gradient is complete. The next forward makes its 16-bit copy again."""
    use_full_precision(param)
    free_low_precision(param)
    _match_grad(param)


def _match_grad(param: Any) -> None:
    if param.grad is not None and param.grad.dtype != param.dtype:
        param.grad.data = param.grad.to(param.dtype)


def _end_backward(hook_state: _AllreduceUpcastHookState, model: Any) -> None:
    """Wait for the casts, remove hooks that the next forward sets again, restore parameters without a gradient."""
    hook_state.wait_for_stream_enqueued = False
    if hook_state.upcast_stream is not None:
        torch.accelerator.current_stream().wait_stream(hook_state.upcast_stream)
    for param in model.module.parameters():
        drop_precision_hook(param)
        if not param.requires_grad and not is_ignored(param):
            use_full_precision(param)
        _match_grad(param)
