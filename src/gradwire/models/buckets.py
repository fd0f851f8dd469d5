"""Smaller buckets for a DDP model: the sooner a bucket is full, the more of its communication is hidden by backward.

DDP's default of 25 MB suits links on which the latency of a collective costs more than its bytes. On a slow link a step
waits for the last bucket, which nothing hides. DDP has no call to change the size, so its reducer is built again, as
DDP's constructor does, before it has a hook.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch.ddp import (
    counted_parameters,
    had_forward,
    has_delayed_params,
    has_python_reducer,
    rebuild_reducer,
)
from gradwire.errors import RegisterError, SpecError

SMALLEST_BYTES = 4 << 20
"""Smaller buckets cost more than they hide."""
LARGEST_BYTES = 1 << 50
"""Larger than any model, which is then one bucket."""
MIB = 1 << 20

log = logging.getLogger("gradwire")


def check_bucket_mb(bucket_mb: float | None) -> None:
    """Raise SpecError unless `bucket_mb` is None or a positive size."""
    known = isinstance(bucket_mb, int | float) and not isinstance(bucket_mb, bool)
    if bucket_mb is not None and not (known and math.isfinite(bucket_mb) and bucket_mb > 0):
        raise SpecError(f"bucket_mb must be a finite number above 0, or None to let gradwire choose; got {bucket_mb!r}")


def rebucket(model: DistributedDataParallel, params: Sequence[Tensor], bucket_mb: float | None, buckets: int) -> None:
    """Cut the gradients of `params`, those that DDP averages, into buckets of `bucket_mb` (MiB, as `bucket_cap_mb`).

    If `bucket_mb` is None, a CPU model with DDP's default is cut into `buckets` parts of at least 4 MiB each (0: it is
    left alone). A model with a `bucket_cap_mb` of its own keeps it, and so does a GPU model, as what suits GPUs has not
    been measured.
    """
    why_not = _why_not(model, params)
    if bucket_mb is not None and why_not:
        raise RegisterError(
            f"bucket_mb cannot change the buckets of a DDP model with {why_not}; give DDP its bucket_cap_mb"
        )
    wanted = None if bucket_mb is None else int(min(max(bucket_mb * MIB, 1), LARGEST_BYTES))
    cap_bytes = _choose(model, params, buckets) if wanted is None else wanted
    if cap_bytes is None or why_not:
        return
    before = dict(vars(model))
    try:
        with torch.inference_mode(False):  # in which new buckets could not be written to
            rebuild_reducer(model, cap_bytes)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        vars(model).update(before)
        problem = f"this torch makes buckets in a way that gradwire does not know ({error}), so they stay as they are"
        if bucket_mb is not None:
            raise RegisterError(f"{problem}; give DDP its bucket_cap_mb instead") from error
        log.warning("%s: bucket_cap_mb=%.1f in DDP may be faster", problem, cap_bytes / MIB)


def _why_not(model: Any, params: Sequence[Tensor]) -> str:
    """Why a new reducer would differ from the current one in more than its buckets; empty if it would not."""
    if has_python_reducer(model):
        return "DDP's compiled reducer"
    if getattr(model, "mixed_precision", None) is not None:
        return "DDP's mixed_precision"
    if has_delayed_params(model):
        return "delay_all_reduce_named_params"
    if had_forward(model):
        return "a forward pass behind it"  # a backward pass may be under way, and a static graph is known
    found = len(params), sum(param.numel() * param.element_size() for param in params)
    if found != counted_parameters(model):
        return "parameters frozen or unfrozen since"  # DDP goes on averaging those that it was built with
    return ""


def _choose(model: Any, params: Sequence[Tensor], buckets: int) -> int | None:
    is_default = getattr(model, "bucket_bytes_cap_default", False) and buckets > 0
    if not is_default or model.process_group.size() == 1 or any(param.device.type != "cpu" for param in params):
        return None
    total = sum(param.numel() * param.element_size() for param in params)
    cap_bytes = max(SMALLEST_BYTES, -(-total // buckets))
    return cap_bytes if cap_bytes < min(total, model.bucket_bytes_cap) else None
