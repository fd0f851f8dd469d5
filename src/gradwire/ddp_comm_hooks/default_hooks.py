"""Drop-in for torch's `default_hooks`: exact and half-precision averaging.

What was encoded in 16 bits is summed in float32, so the error does not grow with the number of ranks. fp16 carries a
scale, so nothing overflows or vanishes. The wrappers return the gradient in its own type.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from typing import Any

import torch
import torch.distributed as dist

from gradwire._torch import GradBucket
from gradwire.codecs.bf16 import BF16
from gradwire.codecs.fp16 import FP16
from gradwire.ddp_comm_hooks._group import EXACT, AnyHook, average, mean_of
from gradwire.exchanges import Coded
from gradwire.exchanges.bucket import Bucket, segments_of

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

HALF = {torch.float16: Coded(FP16()), torch.bfloat16: Coded(BF16())}
"""The exchanges of the 16-bit types."""


def _allreduce_fut(process_group: dist.ProcessGroup | None, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Average `tensor` over the group (None: the world) in place; the future's value is the same tensor."""
    flat = tensor if tensor.is_sparse else tensor.view(-1)
    bucket = Bucket(0, flat, segments_of([flat], ["0"]), is_last=True)
    return mean_of(EXACT, process_group, bucket).then(lambda done: (done.value(), tensor)[1])


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average in the gradient's own type, as DDP does without a hook."""
    return average(EXACT, process_group, bucket)


def _compress_hook(
    dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average, sending the given 16-bit type."""
    return average(HALF[dtype], process_group, bucket)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average, sending float16 and summing in float32."""
    return _compress_hook(torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average, sending bfloat16 and summing in float32. Works on every backend."""
    return _compress_hook(torch.bfloat16, process_group, bucket)


def fp16_compress_wrapper(hook: AnyHook) -> AnyHook:
    """A hook that passes the gradients to `hook` in float16 and returns the result in their own type."""

    def fp16_compress_wrapper_hook(hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _wrapped(torch.float16, hook, hook_state, bucket)

    return fp16_compress_wrapper_hook


def bf16_compress_wrapper(hook: AnyHook) -> AnyHook:
    """A hook that passes the gradients to `hook` in bfloat16 and returns the result in their own type."""

    def gradwire_bf16_compress_wrapper_hook(hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _wrapped(torch.bfloat16, hook, hook_state, bucket)

    return gradwire_bf16_compress_wrapper_hook


def _wrapped(dtype: torch.dtype, hook: AnyHook, hook_state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Run `hook` on a 16-bit copy of the bucket. The bucket and the result have their own type again afterwards."""
    if isinstance(bucket, tuple):  # DDP's compiled reducer uses what a hook writes in place, not what it returns
        grad, param = bucket
        half = grad.to(dtype)
        hook(hook_state, (half, param))  # type: ignore[arg-type]
        return grad.copy_(half)  # type: ignore[no-any-return]
    buffer = bucket.buffer()
    if buffer.is_sparse:  # every hook sends it as it is, and the CPU cannot add sparse 16-bit values
        return hook(hook_state, bucket)
    bucket.set_buffer(buffer.to(dtype))

    def widen(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        bucket.set_buffer(buffer)
        return buffer.copy_(done.value())  # type: ignore[no-any-return]

    return hook(hook_state, bucket).then(widen)


# DDP refuses hooks *named* bf16_compress_hook (or its wrapper's) unless the backend is NCCL or XCCL.
bf16_compress_hook.__name__ = "gradwire_bf16_compress_hook"
