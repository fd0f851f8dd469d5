"""Watch: the numbers it records, that training stays the same bit for bit, and when it warns."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from gradwire import RegisterError, SpecError, register
from gradwire.engine import watch as module
from gradwire.engine.watch import STRIDE, Watch
from gradwire.exchanges.bucket import make_bucket

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.trial import loss, raised

SPECS = ("int4:exempt=none", "int2:feedback=true,exempt=none", "powersgd:rank=1,min_compression=0.5")


def trained(ranks: Ranks, watch: int | None, steps: int = 6, bad: int | None = None):
    """Parameters after some steps of AdamW with two batches each, and the hook. In step `bad` gradients are NaN."""
    model = ranks.wrap(seeded(models.Deep, 3), bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook = ranks.register(model, watch=watch, optimizer=optimizer)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with model.no_sync():
            loss(model(batch(ranks.rank, step))).backward()
        loss(model(batch(ranks.rank, 100 + step)) * (math.nan if step == bad else 1)).backward()
        if step != bad:
            optimizer.step()
    return [param.detach().clone() for param in model.parameters()], hook


@on_ranks(2, specs=SPECS)
def test_training_stays_the_same_bit_for_bit(ranks: Ranks) -> None:
    plain, _ = trained(ranks, None)
    watched, hook = trained(ranks, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [record.step for record in hook.watched()] == [2, 4, 6]
    assert all(0 < record.error < 2 and 0 < record.cosine < 1 and record.update_error for record in hook.watched())
    everyone = hook.gather(torch.tensor([record.error for record in hook.watched()]))
    assert torch.equal(everyone[0], everyone[1])


@on_ranks(2, specs=SPECS[:1])
def test_steps_that_are_not_finite_are_left_out_and_a_switch_starts_again(ranks: Ranks) -> None:
    _, hook = trained(ranks, 2, bad=4)
    assert [record.step for record in hook.watched()] == [2, 6]
    hook.switch("int8")
    assert hook.watched() == ()


@on_ranks(2)
def test_ranks_must_watch_the_same_steps(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 3))
    text = raised(RegisterError, lambda: ranks.register(model, "int8", watch=5 + ranks.rank))
    assert "watch" in text
    assert "'6'" in text
    assert "does not average" in raised(SpecError, lambda: ranks.register(model, "noop", watch=5))


@pytest.mark.parametrize("wrong", [{"watch": 0}, {"watch": True}, {"optimizer": "adam"}])
def test_wrong_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        register(torch.nn.Linear(2, 2), "int8", **wrong)


def compared(watch: Watch, step: int, exact: torch.Tensor, result: torch.Tensor) -> None:
    """A watched step in which the hook's mean of `exact` was `result`."""
    param = watch.optimizer.param_groups[0]["params"][0] if watch.optimizer else exact
    bucket = make_bucket([exact])
    bucket = type(bucket)(0, bucket.flat, (type(bucket.segments[0])("0", param, 0, exact.numel()),), True)
    watch.begin(step, "int4")
    _, compare, _ = watch.add(bucket, [], None)
    bucket.flat.copy_(result.flatten())
    compare()
    watch.finish("int4")


def test_the_numbers_are_those_of_the_sampled_values() -> None:
    exact, noise = torch.randn(40, 50), torch.randn(40, 50)
    param = torch.nn.Parameter(torch.zeros(40, 50))
    optimizer = torch.optim.AdamW([param])
    optimizer.state[param] = {"exp_avg_sq": torch.rand(40, 50) + 0.01}
    watch = Watch(7, optimizer)
    compared(watch, 14, exact, exact + noise)
    x, e = (value.flatten()[2::STRIDE].double() for value in (exact, noise))
    d = optimizer.state[param]["exp_avg_sq"].flatten()[2::STRIDE].double().sqrt()
    (record,) = watch.records
    assert record.step == 14
    assert record.error == pytest.approx(float(e.norm() / x.norm()), rel=1e-5)
    assert record.cosine == pytest.approx(float(torch.cosine_similarity(x + e, x, dim=0)), rel=1e-5)
    assert record.update_error == pytest.approx(float((e / d).norm() / (x / d).norm()), rel=1e-5)


def test_it_warns_once_when_two_records_leave_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USUAL_STEPS", 8)
    watch, exact = Watch(1), torch.ones(310)
    errors = [0.10, 0.12, 0.11, 0.10, 0.12, 0.11, 0.10, 0.12, *(0.13, 0.30, 0.13, 0.30, 0.31, 0.32, 0.33)]
    warned = []
    for step, error in enumerate(errors, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compared(watch, step, exact, exact * (1 + error))
        warned += [(step, str(one.message)) for one in caught]
    assert [step for step, _ in warned] == [13]
    assert "0.31 of its size at step 13" in warned[0][1]
    assert "0.1 to 0.12" in warned[0][1]
