"""Step 4: error feedback. What this step's encoding lost is added back at the next step.

Residuals are float32, in units of undivided gradients, and belong to parameters: `Residuals` keeps one flat tensor a
bucket while DDP's buckets stay as they are, and lays the values out anew by parameter name when DDP re-cuts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gradwire.bucket import Bucket
from gradwire.codecs.base import new_total
from gradwire.errors import StateError


@contextmanager
def fed_back(flat: Tensor, residual: Tensor | None) -> Iterator[Tensor]:
    """Gives `flat` plus `residual` to average; on exit, takes the new residual back if the mean held inf or NaN.

    The body replaces the values by their mean and writes what was lost into `residual`, through `keep_loss_`. A chunk
    with a non-finite mean belongs to a step that the optimizer will skip, so it must leave no trace.
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
    """The values in a type to calculate in: float32, or float64 for those who have it."""
    return new_total(flat).copy_(flat) if flat.dtype.itemsize < 4 else flat


class Residuals:
    """What is owed to each parameter, by name."""

    def __init__(self) -> None:
        self._flats: dict[tuple[str, ...], Tensor] = {}
        self._owed: dict[str, Tensor] = {}
        self._paid: dict[tuple[str, ...], list[Tensor]] = {}
        """For buckets that `due` handed out: whether each chunk has been paid since."""

    def of(self, bucket: Bucket) -> Tensor:
        """The flat residual of a bucket: zeros at first, then whatever its parameters are owed."""
        key = bucket.names
        self._paid.pop(key, None)
        if key not in self._flats:
            self._lay_out(key, bucket)
        return self._flats[key]

    def due(self, bucket: Bucket) -> tuple[Tensor, list[Tensor]] | None:
        """Like `of`, for an exchange that keeps none: what is still to be paid. None if that is nothing.

        With it comes a list, to which each chunk adds a truth value: whether it was paid. Once all are, it is gone.
        """
        self._forget_paid()
        if not any(name in self._owed for name in bucket.names):
            return None
        residual = self.of(bucket)
        self._paid[bucket.names] = []
        return residual, self._paid[bucket.names]

    def _forget_paid(self) -> None:
        for key, paid in list(self._paid.items()):
            if paid and all(paid):
                self._owed = {name: owed for name, owed in self._owed.items() if name not in key}
                del self._paid[key]
                self._flats.pop(key, None)

    def by_name(self) -> dict[str, Tensor]:
        """A copy of every parameter's residual, flat, in memory order."""
        self._forget_paid()
        return {name: owed.clone() for name, owed in self._owed.items()}

    def load(self, owed: Mapping[str, Tensor]) -> None:
        """Replace everything that is kept."""
        self._flats.clear()
        self._paid.clear()
        self._owed = {name: value.detach().float().clone() for name, value in owed.items()}

    def scale_(self, factor: float) -> None:
        """Multiply what is kept, when the gradients' unit changes."""
        if not (isinstance(factor, int | float) and math.isfinite(factor) and factor > 0):
            raise StateError(f"scale_state: factor must be a finite number above 0, got {factor!r}")
        for owed in self._owed.values():
            owed.mul_(factor)

    def _lay_out(self, key: tuple[str, ...], bucket: Bucket) -> None:
        flat = torch.zeros(bucket.flat.numel(), dtype=torch.float32, device=bucket.flat.device)
        views = flat.split([segment.numel for segment in bucket.segments])
        for name, view in zip(key, views, strict=True):
            if name in self._owed:
                if self._owed[name].numel() != view.numel():
                    raise StateError(
                        f"the residual of {name!r} has {self._owed[name].numel()} values, the gradient {view.numel()}: "
                        "the checkpoint is of another model"
                    )
                view.copy_(self._owed[name])
            self._owed[name] = view
        self._flats = {names: kept for names, kept in self._flats.items() if not set(names) & set(key)}
        self._flats[key] = flat
