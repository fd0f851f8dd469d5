"""Small models with one difficulty each, and the data every rank trains them on."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

WIDTH = 16


def batch(rank: int, step: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank's own rows of a step: anybody can make anybody's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, width, generator=generator, dtype=torch.float32).to(dtype)


def seeded(make: type[nn.Module], *args: object, **options: object) -> nn.Module:
    """A module that is the same on every rank, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make(*args, **options)


class Deep(nn.Module):
    """Residual layers, so that every one has a gradient of about the same size."""

    def __init__(self, layers: int = 3, width: int = WIDTH, *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Picky(Deep):
    """Uses only the layers it is told to; `use` is set on each rank."""

    use: Collection[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        for index in self.use:
            x = x + torch.tanh(self.layers[index](x))
        return x


class Reusing(Deep):
    """Runs its layers twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Normed(nn.Module):
    """Has buffers, which DDP broadcasts before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.into(x))))


class MixedTypes(nn.Module):
    """A layer of each real type, so that DDP makes a bucket for each."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in self.dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = x + torch.tanh(layer(x.to(dtype))).float()
        return x


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class RankedTask(nn.Module):
    """The model of torch's own hook tests: the forward pass depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(40, 20))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.p * x ** (1 + rank)
