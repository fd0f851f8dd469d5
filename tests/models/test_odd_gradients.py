"""Parameters and gradients of unusual types, layouts and values."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from gradwire import RegisterError
from gradwire.models.ddp import from_ddp

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import AVERAGING, MAIN, SPECS, Ranks, on_ranks
from ..kit.trial import Trial, loss
from ..kit.versions import complex_gradients


def trained(ranks: Ranks, module: nn.Module, **options: object) -> Trial:
    trial = Trial(ranks, module, **options).steps(2)
    assert trial.hook.verify().steps == 2
    return trial


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_float16_parameters(ranks: Ranks) -> None:
    trained(ranks, seeded(models.Typed, torch.float16), bucket_cap_mb=0.002)


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_bfloat16_parameters(ranks: Ranks) -> None:
    trained(ranks, seeded(models.Typed, torch.bfloat16), bucket_cap_mb=0.002)


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_float64_parameters(ranks: Ranks) -> None:
    trial = trained(ranks, seeded(models.Typed, torch.float64), bucket_cap_mb=0.002)
    if ranks.spec == "exact":
        torch.testing.assert_close(trial.emitted[-1], trial.means[-1], rtol=1e-13, atol=1e-13)


@on_ranks(2, thorough=(3,), specs=SPECS)
def test_parameters_of_four_types(ranks: Ranks) -> None:
    trial = trained(ranks, seeded(models.MixedTypes))
    assert len(trial.hook.layouts) == 4


def sparse(ranks: Ranks, dtype: torch.dtype) -> None:
    trial = Trial(ranks, seeded(models.Embedded, dtype))
    for step in range(2):
        trial.step(models.rows(ranks.rank, step))
        assert trial.params[0].grad.is_sparse
    assert trial.hook.verify().steps == 2


@on_ranks(1, 2, thorough=(3,), specs=MAIN)
def test_sparse_gradient(ranks: Ranks) -> None:
    sparse(ranks, torch.float32)


@on_ranks(2, specs=MAIN)
def test_sparse_float64_gradient(ranks: Ranks) -> None:
    sparse(ranks, torch.float64)


@on_ranks(2, thorough=(3,), specs=AVERAGING)
def test_sparse_gradient_is_exact(ranks: Ranks) -> None:
    """A sparse gradient travels as it is, whatever the hook: no codec loses a row."""
    model = ranks.wrap(seeded(models.Embedded))
    ranks.register(model)
    model(models.rows(ranks.rank, 0)).sum().backward()
    table = model.module.table.weight.grad.to_dense()
    share = float(model.module.out.weight.detach().sum(0).abs().max())
    assert float(table[20].abs().max()) > 0
    torch.testing.assert_close(float(table[20].abs().max()), 2 * share, rtol=1e-5, atol=0)
    torch.testing.assert_close(float(table[ranks.rank].abs().max()), share / ranks.size, rtol=1e-5, atol=0)


@complex_gradients
@on_ranks(2, thorough=(3,), specs=MAIN)
def test_complex64_parameters(ranks: Ranks) -> None:
    trained(ranks, seeded(models.Complex))


@complex_gradients
@on_ranks(2, specs=MAIN)
def test_complex128_parameters(ranks: Ranks) -> None:
    trained(ranks, seeded(models.Complex, torch.complex128))


@complex_gradients
@on_ranks(2, thorough=(3,), specs=MAIN)
def test_complex_parameters_in_small_chunks(ranks: Ranks) -> None:
    trained(ranks, seeded(models.Complex), register={"chunk_bytes": 1024})


def test_buckets_of_complex_numbers_are_refused() -> None:
    """DDP of torch 2.9.1 passes these; later versions pass two real values for each."""

    class ComplexBucket:
        def buffer(self) -> torch.Tensor:
            return torch.zeros(4, dtype=torch.complex64)

        def parameters(self) -> list[torch.Tensor]:
            return [self.buffer()]

    with pytest.raises(RegisterError, match=r"passes complex gradients; use torch 2\.13, or real parameters"):
        from_ddp(ComplexBucket(), lambda param: "")


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_channels_last(ranks: Ranks) -> None:
    trial = trained(ranks, seeded(models.Pictures))
    assert trial.params[0].stride() == (27, 1, 9, 3)


@on_ranks(2, specs=MAIN)
def test_channels_last_in_bucket_views_and_chunks(ranks: Ranks) -> None:
    trained(ranks, seeded(models.Pictures), gradient_as_bucket_view=True, register={"chunk_bytes": 1024})


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_strided_parameters(ranks: Ranks) -> None:
    trial = trained(ranks, seeded(models.Strided))
    assert not trial.params[0].is_contiguous()


@on_ranks(2, specs=MAIN)
def test_strided_parameters_in_bucket_views(ranks: Ranks) -> None:
    trained(ranks, seeded(models.Strided), gradient_as_bucket_view=True)


@on_ranks(1, 2, thorough=(3,), specs=MAIN)
def test_scalar_and_empty_parameters(ranks: Ranks) -> None:
    trial = trained(ranks, seeded(models.Tiny))
    assert trial.params[0].grad.shape == ()


@on_ranks(2, 4, thorough=(3,), specs=MAIN)
def test_fewer_values_than_ranks(ranks: Ranks) -> None:
    """Fewer values than ranks."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.one

    warning = pytest.warns(UserWarning, match="there is none") if ranks.spec.startswith("powersgd") else nullcontext()
    with warning:
        trained(ranks, seeded(Single))


@on_ranks(2, thorough=(3,), specs=AVERAGING)
def test_inf_and_nan_reach_every_rank(ranks: Ranks) -> None:
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
