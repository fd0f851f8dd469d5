"""Drop-in for torch's `default_hooks`: exact and half-precision averaging.

The wire is summed in float32, so the error does not grow with the ranks; fp16 carries a scale, so nothing overflows or
vanishes; and the wrappers give the gradient back in the type it came in.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradwire._torch import GradBucket
from gradwire.ddp_comm_hooks._group import averaged, mean_of
from gradwire.exchanges.bucket import Bucket, segments_of

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

AnyHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def _allreduce_fut(process_group: dist.ProcessGroup | None, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The mean of `tensor` over the group (None: the world), in place; a future of the same tensor."""
    flat = tensor if tensor.is_sparse else tensor.view(-1)
    bucket = Bucket(0, flat, segments_of([flat], ["0"]), is_last=True)
    return mean_of("exact", process_group, bucket).then(lambda done: (done.value(), tensor)[1])


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean in the gradient's own type, as DDP computes it without a hook."""
    return averaged("exact", process_group, bucket)


def _compress_hook(
    dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean through a 16-bit wire of the given type."""
    return averaged({torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype], process_group, bucket)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean through a float16 wire with float32 sums."""
    return _compress_hook(torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean through a bfloat16 wire with float32 sums. Works on every backend."""
    return _compress_hook(torch.bfloat16, process_group, bucket)


def fp16_compress_wrapper(hook: AnyHook) -> AnyHook:
    """Let `hook` see the gradients in float16, and give its result back in the gradients' own type."""

    def fp16_compress_wrapper_hook(hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _wrapped(torch.float16, hook, hook_state, bucket)

    return fp16_compress_wrapper_hook


def bf16_compress_wrapper(hook: AnyHook) -> AnyHook:
    """Let `hook` see the gradients in bfloat16, and give its result back in the gradients' own type."""

    def gradwire_bf16_compress_wrapper_hook(hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _wrapped(torch.bfloat16, hook, hook_state, bucket)

    return gradwire_bf16_compress_wrapper_hook


def _wrapped(
    dtype: torch.dtype, hook: AnyHook, hook_state: Any, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Run `hook` on a 16-bit copy of the bucket; bucket and result end up in the type they came in."""
    buffer = bucket.buffer()
    if buffer.is_sparse:  # travels as it is under every hook; sums of sparse 16-bit values do not exist on a CPU
        return hook(hook_state, bucket)
    bucket.set_buffer(buffer.to(dtype))

    def widen(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        bucket.set_buffer(buffer)
        return buffer.copy_(done.value())

    return hook(hook_state, bucket).then(widen)


# DDP refuses hooks *named* bf16_compress_hook (or its wrapper's) off NCCL and XCCL; this one works on gloo too.
bf16_compress_hook.__name__ = "gradwire_bf16_compress_hook"
allreduce_hook.spec = "exact"  # type: ignore[attr-defined]
fp16_compress_hook.spec = "fp16"  # type: ignore[attr-defined]
bf16_compress_hook.spec = "bf16"  # type: ignore[attr-defined]
