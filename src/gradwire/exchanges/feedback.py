"""Error feedback inside an exchange: what one step's encoding loses is added back at the next step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, new_total
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket

log = logging.getLogger("gradwire")


@contextmanager
def fed_back(flat: Tensor, residual: Tensor | None) -> Iterator[Tensor]:
    """Yield `flat + residual`; on exit, restore the residual if the mean holds inf or NaN.

    The body replaces the yielded values by their mean and writes what was lost into `residual`. The optimizer skips a
    step whose mean is not finite, so that step must not change the residual. Inf and NaN in the residual itself, from
    a loss that is too large for float32, would make every later mean non-finite too, so they are replaced by zero.
    """
    if residual is None:
        yield flat
        return
    before, work = residual.clone(), working_copy(flat).add_(residual)
    yield work
    if work is not flat:
        flat.copy_(work)
    if flat.device.type != "cpu":  # where the host must not wait for the answer
        torch.where(finite(flat), residual, before, out=residual).nan_to_num_(0.0, 0.0, 0.0)
        return
    if not all_finite(flat):
        residual.copy_(before)
    healed_(residual)


def healed_(residual: Tensor) -> Tensor:
    """Replace inf and NaN by zero, in place, and warn if there were any. It waits for the values."""
    if not all_finite(residual):
        bad = int((~torch.isfinite(residual)).sum())
        log.warning("%d values that error feedback had kept were inf or NaN; they are zero from now on", bad)
        residual.nan_to_num_(0.0, 0.0, 0.0)
    return residual


def finite(values: Tensor) -> Tensor:
    """Whether there is neither inf nor NaN, as a tensor on their device. The host does not wait; nothing is copied."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(torch.aminmax(values)).isfinite().all()  # NaN is both the least and the largest


def all_finite(values: Tensor) -> bool:
    """Whether there is neither inf nor NaN. Their sum says so in a twentieth of the time, unless it overflows."""
    total = values.sum(dtype=torch.float32 if values.dtype.itemsize < 4 else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())


@contextmanager
def withheld(bucket: Bucket, comm: Comm, residual: Tensor) -> Iterator[None]:
    """Keep the residual of tensors whose gradients are zero on all ranks out of the mean. One collective.

    DDP discards the mean of a parameter that no rank has used (`find_unused_parameters=True`). Its gradients are zero
    on all ranks. A residual that went into such a mean would be lost.
    """
    numels = [segment.numel for segment in bucket.segments]
    used = comm.all_reduce_(torch.stack([part.any() for part in bucket.flat.split(numels)]).float())
    unused = torch.cat([flag.expand(numel) for flag, numel in zip((used == 0).unbind(), numels, strict=True)])
    kept = torch.where(unused, residual, 0.0)
    residual.masked_fill_(unused, 0.0)
    yield
    residual.add_(kept)


def working_copy(flat: Tensor) -> Tensor:
    """`flat` itself, or a float32 copy of 16-bit values, which are too coarse to calculate in."""
    return new_total(flat).copy_(flat) if flat.dtype.itemsize < 4 else flat


def widens(flat: Tensor, codec: Codec) -> bool:
    """Whether values must be float32 to be coded fast: 16-bit ones on the CPU, unless they travel as they are."""
    if flat.device.type != "cpu" or codec.wire_dtype == flat.dtype or torch.compiler.is_compiling():
        return False
    return flat.dtype.itemsize < 4


def widened(flat: Tensor, codec: Codec) -> Tensor:
    """A float32 copy of values that `widens`; other values as they are."""
    return working_copy(flat) if widens(flat, codec) else flat
