"""Small models with one difficulty each, and the data that ranks train them on."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


def batch(rank: int, step: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    """The data of a rank at a step. Every rank can make those of the others."""
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
    """Uses only the layers in `use`, which each rank sets."""

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


class Typed(Deep):
    """All parameters of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(4)
        self.dtype = dtype
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.dtype))


class Embedded(nn.Module):
    """A table with sparse gradients, and a dense layer on top."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH, sparse=True, dtype=dtype)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, rows: Tensor) -> Tensor:
        return self.out(self.table(rows))


def rows(rank: int, step: int) -> Tensor:
    """Row numbers of which some are this rank's alone, some all ranks', and some repeated."""
    return torch.tensor([rank, rank + 4, 20, 20, 21 + step])


class Complex(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.into(x).to(self.weight.dtype) @ self.weight + self.bias


class Pictures(nn.Module):
    """Convolutions whose weights lie in memory channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 2)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.repeat(1, 3 * 36 // WIDTH + 1)[:, : 3 * 36].reshape(-1, 3, 6, 6))


class Strided(nn.Module):
    """A transposed weight, one with gaps in memory, and one that is a permuted block."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, WIDTH).t() / 4)
        self.gappy = nn.Parameter(torch.randn(5, 14)[:, ::2] / 2)
        self.permuted = nn.Parameter(torch.randn(2, 7, 3).permute(1, 2, 0) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij,jk,klm->bm", x, self.transposed, self.gappy, self.permuted)


class Tiny(nn.Module):
    """A scalar, an empty parameter, an empty one that is a bucket by itself, and a single value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.alone = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.one = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.empty.sum() + self.alone.sum().float()
        return self.out(x) * self.scale + self.one + nothing


class Checkpointed(Deep):
    """Computes its activations again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x
