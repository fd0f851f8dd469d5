"""Residuals: what error feedback keeps for each parameter between steps.

Residuals are float32, in units of undivided gradients, and belong to parameters. `Residuals` keeps one flat tensor per
bucket while DDP's buckets stay as they are, and lays the values out again by parameter name when DDP re-cuts them.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.engine.observers import norm_of
from gradwire.errors import StateError
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.feedback import healed_


class Residuals:
    """The residual of each parameter, by name."""

    def __init__(self) -> None:
        self.by_param: dict[str, Tensor] = {}
        """Views of the flat tensors below, or values from a checkpoint that no bucket has used yet."""
        self._flats: dict[tuple[str, ...], Tensor] = {}
        self._applied: dict[tuple[str, ...], list[Tensor]] = {}
        """For buckets that `pending` has handed out: whether each chunk has been applied since."""

    def of(self, bucket: Bucket) -> Tensor:
        """The flat residual of a bucket: zeros at first, then what is kept for its parameters."""
        key = bucket.names
        self._applied.pop(key, None)
        if key not in self._flats:
            self._lay_out(key, bucket)
        return self._flats[key]

    def pending(self, bucket: Bucket) -> tuple[Tensor, list[Tensor]] | None:
        """Like `of`, for an exchange that keeps no residual: what an earlier exchange left to apply. None if nothing.

        Each chunk appends a truth value to the list that is returned too: whether its residual was applied. Once all
        chunks have applied theirs, the residual is dropped: at the bucket's next step, when its jobs have ended. The
        jobs of other buckets may still be under way, so that their truth values cannot be read yet on an accelerator.
        """
        self._drop_applied([bucket.names])
        if not any(name in self.by_param for name in bucket.names):
            return None
        residual = self.of(bucket)
        self._applied[bucket.names] = []
        return residual, self._applied[bucket.names]

    def copies(self) -> dict[str, Tensor]:
        """A copy of every parameter's residual, flat, in memory order. Between steps."""
        self._drop_applied(list(self._applied))
        return {name: residual.clone() for name, residual in self.by_param.items()}

    def norm(self) -> Tensor | None:
        """Of all residuals together; None if there is none."""
        return norm_of(self.by_param.values()) if self.by_param else None

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace everything that is kept."""
        self._flats.clear()
        self._applied.clear()
        self.by_param = {name: value.detach().float().clone() for name, value in residuals.items()}

    def scale_(self, factor: float) -> None:
        """Multiply all residuals, when the unit of the gradients changes."""
        if not (isinstance(factor, int | float) and math.isfinite(factor) and factor > 0):
            raise StateError(f"scale_state: factor must be a finite number above 0, got {factor!r}")
        for residual in self.by_param.values():
            healed_(residual.mul_(factor))

    def _drop_applied(self, keys: Sequence[tuple[str, ...]]) -> None:
        for key in keys:
            applied = self._applied.get(key)
            if applied and all(applied):
                self.by_param = {name: kept for name, kept in self.by_param.items() if name not in key}
                del self._applied[key]
                self._flats.pop(key, None)

    def _lay_out(self, key: tuple[str, ...], bucket: Bucket) -> None:
        flat = torch.zeros(bucket.flat.numel(), dtype=torch.float32, device=bucket.flat.device)
        views = flat.split([segment.numel for segment in bucket.segments])
        for name, view in zip(key, views, strict=True):
            if (kept := self.by_param.get(name)) is not None:
                if kept.numel() != view.numel():
                    raise StateError(
                        f"the residual of {name!r} has {kept.numel()} values, its gradient {view.numel()}: "
                        "the checkpoint is of another model"
                    )
                view.copy_(kept)
            self.by_param[name] = view
        self._flats = {names: kept for names, kept in self._flats.items() if not set(names) & set(key)}
        self._applied = {names: kept for names, kept in self._applied.items() if not set(names) & set(key)}
        self._flats[key] = flat
