"""Auto on models with `fully_shard`, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.auto.pilot import WARM_STEPS
from gradwire.auto.settings import Auto
from gradwire.auto.sharded import ShardedPilot, pair_name, pairs, split_pair
from gradwire.engine.sharded import ShardedHook
from gradwire.errors import SpecError

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import gradients, mesh_of, same, shard
from ..kit.versions import sharded_models

NAMES = ("exact", "exact/bf16", "int8", "int8/bf16")
COST_S = {"exact": 0.4, "exact/bf16": 0.3, "int8": 0.25, "int8/bf16": 0.1}


class Clock:
    """Time passes when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(ranks: Ranks, hook: ShardedHook, model: Any, clock: Clock, steps: int, *, skip: int = -1) -> list[str]:
    """Train, and return the candidate of every step. Step `skip` has a gradient that is not finite."""
    used = []
    for step in range(steps):
        loss = model(batch(ranks.rank, step)).square().mean()
        before = str(hook.gathers)
        (loss * (float("inf") if step == skip else 1.0)).backward()
        assert str(hook.gathers) == before  # forward and backward use the same parameters
        for param in model.parameters():
            param.grad = None
        used.append(pair_name(str(hook.exchange), str(hook.gathers)))
        clock.now += COST_S[used[-1]] * (1 + 0.01 * ranks.rank)
    return used


@sharded_models
@on_ranks(2)
def test_all_ranks_settle_on_the_fastest_pair_at_the_same_step(ranks: Ranks) -> None:
    model, clock = shard(seeded(models.Deep), mesh_of(ranks)), Clock()
    hook = ranks.register(model, "auto", max_error=0.1)
    assert isinstance(hook, ShardedHook)
    hook.pilot = ShardedPilot(hook, Auto(max_error=0.1), names=NAMES, clock=clock)
    used = drive(ranks, hook, model, clock, 40, skip=WARM_STEPS + 1)
    assert used[: WARM_STEPS + 2] == ["exact"] * (WARM_STEPS + 2)
    assert set(used) == set(NAMES)
    assert used[-1] == "int8/bf16"
    reason = hook.stats().reason
    assert reason.startswith("int8/bf16: error 0.00")
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, (used, reason), group=ranks.group)
    assert everyone[0] == everyone[1]
    hook.switch("exact", gather="exact")
    assert hook.pilot is None


@sharded_models
@on_ranks(2)
def test_the_error_is_that_of_the_reduce_scatter_and_measuring_changes_nothing(ranks: Ranks) -> None:
    """The step in which errors are measured has the gradients of plain FSDP2."""
    plain, model = (shard(seeded(models.Deep), mesh_of(ranks)) for _ in range(2))
    hook = ranks.register(model, "auto", gather="exact", hooks=["int8", "int4:exempt=none"], max_error=1e-9)
    for step in range(WARM_STEPS + 3):
        for each in (plain, model):
            each.zero_grad()
            each(batch(ranks.rank, step)).square().mean().backward()
        assert same(gradients(model), gradients(plain))
    plain(batch(ranks.rank, 0))
    model(batch(ranks.rank, 0))  # a step begins: all candidates have too large an error
    reason = hook.stats().reason
    assert reason == "exact: no other candidate is within max_error=1e-09"
    errors = hook.pilot._errors  # type: ignore[union-attr]
    assert errors["exact"] == 0.0
    assert 0.0 < errors["int8"] < errors["int4:exempt=none"] / 5


@sharded_models
@on_ranks(2)
def test_a_given_gather_is_kept(ranks: Ranks) -> None:
    model = shard(seeded(models.Deep), mesh_of(ranks))
    hook = ranks.register(model, "auto", gather="int8")
    assert isinstance(hook.pilot, ShardedPilot)
    assert hook.pilot._names == ["exact/int8", "bf16/int8", "int8/int8", "int4/int8"]
    low = shard(seeded(models.Deep).to(torch.bfloat16), mesh_of(ranks))
    other = ranks.register(low, "auto")
    assert isinstance(other.pilot, ShardedPilot)
    assert not any("/" in name for name in other.pilot._names)  # bf16 would save nothing


def test_pairs_are_written_as_one_word() -> None:
    assert pairs(Auto(hooks=("int8",)), ["exact", "bf16"]) == ["exact", "exact/bf16", "int8", "int8/bf16"]
    assert split_pair("int4:block=32/fp16") == ("int4:block=32", "fp16")
    assert gradwire.exchange("int8") == gradwire.exchange(split_pair("int8")[0])
    for wrong, message in (("powersgd", "cannot reduce-scatter"), ("int8/topk", "cannot carry parameters")):
        with pytest.raises(SpecError, match=message):
            split_pair(wrong)
