"""How far a hook's mean is off where no gradients are at hand: on random values of a normal distribution."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor

from gradwire.exchanges import Exchange, TwoLevel
from gradwire.testing import Rank, thread_ranks

RANKS = 4
SHAPES = ((512, 512), (512,))


def noise_error(exchange: Exchange) -> float:
    """Error of the mean, relative to the mean, of one step on 4 ranks that have nothing in common.

    Gradients have more in common, and a structure that low rank and top-k live on: on those it is smaller.
    """
    if isinstance(exchange, TwoLevel):
        exchange = cast(Exchange, dataclasses.replace(exchange, node=RANKS // 2))
    mean = torch.stack([_flat(_gradients(rank)) for rank in range(RANKS)]).mean(0)

    def run(rank: Rank) -> Tensor:
        return rank.mean(exchange, _gradients(rank.rank)).flat.double()

    lost = thread_ranks(RANKS, run)[0] - mean
    return float(lost.norm() / mean.norm())


def _gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.view(-1) for tensor in tensors]).double()
