"""What `advice.py` trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from gradwire.tools.workload import Workload, WorkloadSettings
from rounds import BATCH, LAYERS, WIDTH


class Task(Protocol):
    """One model and its training step."""

    module: nn.Module

    def forward(self, model: nn.Module) -> Tensor:
        """The loss on the next batch."""

    def after(self) -> None:
        """What follows backward."""


class Mlp:
    """The layers of `shaped.py`, without an optimizer."""

    def __init__(self, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        torch.manual_seed(1 + rank)
        self.data = torch.randn(BATCH, WIDTH)

    def forward(self, model: nn.Module) -> Tensor:
        """The same batch every time."""
        model.zero_grad()
        loss: Tensor = model(self.data).square().mean()
        return loss

    def after(self) -> None:
        """Nothing."""


class Gpt:
    """The built-in workload, with its optimizer."""

    def __init__(self, rank: int, size: int) -> None:
        self.workload = Workload(WorkloadSettings(), seed=0, rank=rank, size=size)
        self.module: nn.Module = self.workload.model()
        self.optimizer = self.workload.optimizer(self.module)
        self.steps = 0

    def forward(self, model: nn.Module) -> Tensor:
        """A new batch every time."""
        self.steps += 1
        model.zero_grad()
        return self.workload.loss(model, self.workload.batch(self.steps))

    def after(self) -> None:
        """AdamW."""
        self.optimizer.step()


TASKS: Mapping[str, type[Mlp] | type[Gpt]] = {"gpt": Gpt, "mlp": Mlp}
