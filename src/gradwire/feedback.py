"""Step 4: error feedback. What this step's encoding lost is added back at the next step.

Residuals are float32, in units of undivided gradients, and belong to parameters: `Residuals` keeps one flat tensor a
bucket while DDP's buckets stay as they are, and lays the values out anew by parameter name when DDP re-cuts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gradwire.bucket import Bucket
from gradwire.errors import StateError


@contextmanager
def fed_back(flat: Tensor, residual: Tensor | None) -> Iterator[None]:
    """Add `residual` to `flat` on entry; on exit, take the new residual back if the mean held inf or NaN.

    The body replaces `flat` by the mean and writes what was lost into `residual`, through `keep_loss_`. A step with
    a non-finite mean will be skipped by the optimizer, so it must leave no trace.
    """
    if residual is None:
        yield
        return
    before = residual.clone()
    flat.add_(residual)
    yield
    finite = torch.isfinite(flat).all()
    torch.where(finite, residual, before, out=residual)


class Residuals:
    """What is owed to each parameter, by name."""

    def __init__(self) -> None:
        self._flats: dict[tuple[str, ...], Tensor] = {}
        self._owed: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._owed)

    def of(self, bucket: Bucket) -> Tensor:
        """The flat residual of a bucket: zeros at first, then whatever its parameters are owed."""
        key = bucket.names
        if key not in self._flats:
            self._lay_out(key, bucket)
        return self._flats[key]

    def take(self, bucket: Bucket) -> Tensor | None:
        """Like `of`, but pays the debt: the values are forgotten here. None if nothing is owed."""
        if not any(name in self._owed for name in bucket.names):
            return None
        residual = self.of(bucket)
        for name in bucket.names:
            del self._owed[name]
        del self._flats[bucket.names]
        return residual

    def by_name(self) -> dict[str, Tensor]:
        """A copy of every parameter's residual, flat, in memory order."""
        return {name: owed.clone() for name, owed in self._owed.items()}

    def load(self, owed: Mapping[str, Tensor]) -> None:
        """Replace everything that is kept."""
        self._flats.clear()
        self._owed = {name: value.detach().float().clone() for name, value in owed.items()}

    def scale_(self, factor: float) -> None:
        """Multiply what is kept, when the gradients' unit changes."""
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
