"""Drop-in for torch's `quantization_hooks`: averaging with 8 bits per value.

They work on every backend and with any number of buckets in flight. On 2 ranks each rank sends all its values, as in
torch; from 3 ranks on each rank averages one part for all, so the bytes that a rank sends do not grow with the number
of ranks. The mean is written into the bucket, in the bucket's own type. Inf or NaN on one rank reaches all ranks.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

import torch
import torch.distributed as dist

from gradwire._torch import GradBucket
from gradwire.codecs.int8 import Int8
from gradwire.ddp_comm_hooks._group import average
from gradwire.ddp_comm_hooks._whole_int8 import WholeInt8
from gradwire.errors import SpecError
from gradwire.exchanges import Coded

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average, sending 8-bit integers with one scale for a bucket, or for each chunk of a large one.

    Zero stays zero; values below 1/254 of the largest become zero.
    """
    return average(PER_TENSOR, process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average, sending 8-bit integers with one scale for each `bucket_size` values. The same number on all ranks."""
    return average(_per_channel(bucket_size), process_group, bucket)


PER_TENSOR = Coded(WholeInt8())
_BLOCKS = {block: Coded(Int8(block=block)) for block in (8 << power for power in range(10))}
"""The lengths that the registered codec has kernels for."""


def _per_channel(bucket_size: int) -> Coded:
    if type(bucket_size) is not int or bucket_size < 1:
        raise SpecError(
            "quantization_perchannel_hook: bucket_size, the number of values that share a scale, must be a whole "
            f"number of at least 1, got {bucket_size!r}"
        )
    return _BLOCKS[bucket_size] if bucket_size in _BLOCKS else Coded(WholeInt8(row=bucket_size))


PER_CHANNEL = _per_channel(512)
