"""Parameters and gradients out of the ordinary. Each works like the ordinary ones do."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from . import models
from .kit import AVERAGING, SPECS, UNEVEN, Ranks, check
from .models import WIDTH, batch, seeded
from .trial import Trial, loss


def steps(ranks: Ranks, module: nn.Module, count: int = 2, **options: object) -> Trial:
    trial = Trial(ranks, module, **options)
    for step in range(count):
        trial.step(batch(ranks.rank, step))
    assert trial.hook.verify().steps == count
    return trial


class Typed(models.Deep):
    """All parameters of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(4)
        self.dtype = dtype
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.dtype))


@check(sizes=UNEVEN)
def float16_parameters(ranks: Ranks) -> None:
    steps(ranks, seeded(Typed, torch.float16), bucket_cap_mb=0.002)


@check(sizes=UNEVEN)
def bfloat16_parameters(ranks: Ranks) -> None:
    steps(ranks, seeded(Typed, torch.bfloat16), bucket_cap_mb=0.002)


@check(sizes=UNEVEN)
def float64_parameters(ranks: Ranks) -> None:
    trial = steps(ranks, seeded(Typed, torch.float64), bucket_cap_mb=0.002)
    if ranks.spec == "exact":
        torch.testing.assert_close(trial.emitted[-1], trial.means[-1], rtol=1e-13, atol=1e-13)


@check(sizes=UNEVEN, specs=SPECS)
def parameters_of_four_types(ranks: Ranks) -> None:
    trial = steps(ranks, seeded(models.MixedTypes))
    assert len(trial.hook.layouts) == 4


class Embedded(nn.Module):
    """A table with sparse gradients, and a dense layer on top."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH, sparse=True, dtype=dtype)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, rows: Tensor) -> Tensor:
        return self.out(self.table(rows))


def rows(rank: int, step: int) -> Tensor:
    """Some rows of rank's own, some of everybody's, some twice."""
    return torch.tensor([rank, rank + 4, 20, 20, 21 + step])


def sparse(ranks: Ranks, dtype: torch.dtype) -> None:
    trial = Trial(ranks, seeded(Embedded, dtype))
    for step in range(2):
        trial.step(rows(ranks.rank, step))
        assert trial.params[0].grad.is_sparse
    assert trial.hook.verify().steps == 2


@check(sizes=(1, 2, 3))
def sparse_gradient(ranks: Ranks) -> None:
    sparse(ranks, torch.float32)


@check()
def sparse_float64_gradient(ranks: Ranks) -> None:
    sparse(ranks, torch.float64)


@check(sizes=UNEVEN, specs=AVERAGING)
def sparse_gradient_is_exact(ranks: Ranks) -> None:
    """A sparse gradient travels as it is, whatever the hook: no codec loses a row."""
    model = ranks.wrap(seeded(Embedded))
    ranks.register(model)
    model(rows(ranks.rank, 0)).sum().backward()
    table = model.module.table.weight.grad.to_dense()
    share = float(model.module.out.weight.detach().sum(0).abs().max())
    assert float(table[20].abs().max()) > 0
    torch.testing.assert_close(float(table[20].abs().max()), 2 * share, rtol=1e-5, atol=0)
    torch.testing.assert_close(float(table[ranks.rank].abs().max()), share / ranks.size, rtol=1e-5, atol=0)


class Complex(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.into(x).to(self.weight.dtype) @ self.weight + self.bias


@check(sizes=UNEVEN)
def complex64_parameters(ranks: Ranks) -> None:
    steps(ranks, seeded(Complex))


@check()
def complex128_parameters(ranks: Ranks) -> None:
    steps(ranks, seeded(Complex, torch.complex128))


@check(sizes=UNEVEN)
def complex_parameters_in_small_chunks(ranks: Ranks) -> None:
    steps(ranks, seeded(Complex), register={"chunk_bytes": 1024})


class Pictures(nn.Module):
    """Convolutions whose weights lie in memory channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 2)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.repeat(1, 3 * 36 // WIDTH + 1)[:, : 3 * 36].reshape(-1, 3, 6, 6))


@check(sizes=UNEVEN)
def channels_last(ranks: Ranks) -> None:
    trial = steps(ranks, seeded(Pictures))
    assert trial.params[0].stride() == (27, 1, 9, 3)


@check()
def channels_last_in_bucket_views_and_chunks(ranks: Ranks) -> None:
    steps(ranks, seeded(Pictures), gradient_as_bucket_view=True, register={"chunk_bytes": 1024})


class Strided(nn.Module):
    """A transposed weight, one with gaps in memory, and one that is a permuted block."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, WIDTH).t() / 4)
        self.gappy = nn.Parameter(torch.randn(5, 14)[:, ::2] / 2)
        self.permuted = nn.Parameter(torch.randn(2, 7, 3).permute(1, 2, 0) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij,jk,klm->bm", x, self.transposed, self.gappy, self.permuted)


@check(sizes=UNEVEN)
def strided_parameters(ranks: Ranks) -> None:
    trial = steps(ranks, seeded(Strided))
    assert not trial.params[0].is_contiguous()


@check()
def strided_parameters_in_bucket_views(ranks: Ranks) -> None:
    steps(ranks, seeded(Strided), gradient_as_bucket_view=True)


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


@check(sizes=(1, 2, 3))
def scalar_and_empty_parameters(ranks: Ranks) -> None:
    trial = steps(ranks, seeded(Tiny))
    assert trial.params[0].grad.shape == ()


@check(sizes=(2, 3, 4))
def one_value_in_all(ranks: Ranks) -> None:
    """Fewer values than ranks."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.one

    told = pytest.warns(UserWarning, match="there is none") if ranks.spec.startswith("powersgd") else nullcontext()
    with told:
        steps(ranks, seeded(Single))


@check(sizes=UNEVEN, specs=AVERAGING)
def inf_and_nan_reach_every_rank(ranks: Ranks) -> None:
    """And leave no trace: the steps after it are as right as those before."""
    trial = Trial(ranks, seeded(models.Deep, 3), bucket_cap_mb=0.002)
    trial.step(batch(ranks.rank, 0))
    for bad in (float("inf"), float("nan")):
        trial.optimizer.zero_grad()
        value = loss(trial.model(batch(ranks.rank, 1)))
        (value * bad if ranks.rank == ranks.size - 1 else value).backward()
        for param in trial.params:
            assert not param.grad.isfinite().any(), "a value was hidden"
    for step in (2, 3):
        trial.step(batch(ranks.rank, step))
