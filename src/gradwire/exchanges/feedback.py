"""Error feedback inside an exchange: what one step's encoding loses is added back at the next step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradwire.codecs.base import new_total


@contextmanager
def fed_back(flat: Tensor, residual: Tensor | None) -> Iterator[Tensor]:
    """Yield `flat + residual`; on exit, restore the residual if the mean holds inf or NaN.

    The body replaces the yielded values by their mean and writes what was lost into `residual`. The optimizer skips a
    step whose mean is not finite, so that step must not change the residual.
    """
    if residual is None:
        yield flat
        return
    before, work = residual.clone(), working_copy(flat).add_(residual)
    yield work
    if work is not flat:
        flat.copy_(work)
    torch.where(torch.isfinite(flat).all(), residual, before, out=residual)


def working_copy(flat: Tensor) -> Tensor:
    """`flat` itself, or a float32 copy of 16-bit values, which are too coarse to calculate in."""
    return new_total(flat).copy_(flat) if flat.dtype.itemsize < 4 else flat
