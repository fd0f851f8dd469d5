"""Drop-in for torch's `quantization_hooks`: averaging through 8 bits a value.

Works on every backend and with any number of buckets in flight. On 2 ranks everybody sends everything, as in torch;
from 3 on each rank averages a part for all, so that what a rank sends does not grow with the ranks. The mean is in the
bucket, in the bucket's own type. An inf or NaN on one rank reaches all.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

import torch
import torch.distributed as dist

from gradwire._torch import GradBucket
from gradwire.ddp_comm_hooks._group import averaged
from gradwire.ddp_comm_hooks._whole_int8 import WholeInt8
from gradwire.errors import SpecError
from gradwire.exchanges import Coded, Exchange

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

_PER_TENSOR = Coded(WholeInt8())


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean through 8-bit integers under one scale for all values that travel together.

    That is a bucket, or a piece of a large one. Zero stays zero; values below 1/254 of the largest become zero.
    """
    return averaged(_PER_TENSOR, process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """The mean through 8-bit integers under one scale for each `bucket_size` values, the same on all ranks."""
    return averaged(_per_channel(bucket_size), process_group, bucket)


def _per_channel(bucket_size: int) -> str | Exchange:
    """Rows of the registered codec where it has kernels for them, else of one that takes any length."""
    if type(bucket_size) is not int or bucket_size < 1:
        raise SpecError(
            "quantization_perchannel_hook: bucket_size, the number of values that share a scale, must be a whole "
            f"number of at least 1, got {bucket_size!r}"
        )
    if 8 <= bucket_size <= 4096 and bucket_size & (bucket_size - 1) == 0:
        return f"int8:block={bucket_size}"
    return Coded(WholeInt8(row=bucket_size))


quantization_pertensor_hook.spec = _PER_TENSOR  # type: ignore[attr-defined]
quantization_perchannel_hook.spec = _per_channel(512)  # type: ignore[attr-defined]
