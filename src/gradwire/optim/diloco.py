"""DiLoCo: local training whose outer step has momentum, so that rounds can be long.

The mean of what the ranks have moved in a round is taken for a gradient, along which SGD with Nesterov momentum steps
the global values. See Douillard et al., "DiLoCo" (2023) and, for fragments and delays, "Streaming DiLoCo" (2025).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import SpecError
from gradwire.exchanges import Exchange
from gradwire.optim.fragments import Fragment
from gradwire.optim.local_sgd import LocalSGD


class DiLoCo(LocalSGD):
    """`LocalSGD` with an outer Nesterov step: m <- momentum m + mean(d); g <- g - lr (mean(d) + momentum m).

    `delay` is 1 unless said otherwise (0 if `every` is 1): the exchange has one step's time, during which the wire and
    the processor both work. Good `exchange`s are "bf16", "int4:feedback=true" or "powersgd:rank=4".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        exchange: str | Exchange = "exact",
        fragments: int = 1,
        delay: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (isinstance(outer_lr, int | float) and math.isfinite(outer_lr) and outer_lr > 0):
            raise SpecError(f"outer_lr must be a finite number above 0, got {outer_lr!r}")
        if not (isinstance(outer_momentum, int | float) and 0 <= outer_momentum < 1):
            raise SpecError(f"outer_momentum must be in [0, 1), got {outer_momentum!r}")
        self.outer_lr, self.outer_momentum = float(outer_lr), float(outer_momentum)
        if delay is None:
            delay = 0 if every == 1 else 1
        super().__init__(
            model,
            optimizer,
            every=every,
            exchange=exchange,
            fragments=fragments,
            delay=delay,
            process_group=process_group,
        )
        self.momentum = [fragment.flat() for fragment in self.fragments]

    def outer_state(self) -> dict[str, list[Tensor]]:
        """The momentum."""
        return {"momentum": self.momentum}

    def _outer_step_(self, fragment: Fragment, values: Tensor, mean: Tensor) -> None:
        momentum = self.momentum[fragment.index].mul_(self.outer_momentum).add_(mean)
        values.add_(mean.add_(momentum, alpha=self.outer_momentum), alpha=-self.outer_lr)

    def __str__(self) -> str:
        return f"{super().__str__()[:-1]}, outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum})"
