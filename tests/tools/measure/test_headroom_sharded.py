"""Headroom of models with `fully_shard`: the training stays the same, and each direction has its own time."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire
from gradwire.tools.cli.headroom import to_text
from gradwire.tools.launch.link import PAYLOAD, Link, emulate
from gradwire.tools.measure import alternate, alternate_sharded
from gradwire.tools.measure.alternate import WARM_UP
from gradwire.tools.measure.alternate_sharded import (
    KINDS,
    REPLICA_KINDS,
    REPLICAS,
    AlternatingSharded,
    Event,
    ShardedClock,
    Timeline,
    kind_of,
    typical,
)
from gradwire.tools.measure.headroom import Headroom

from ...kit import models
from ...kit.models import batch, seeded
from ...kit.ranks import Ranks, on_ranks
from ...kit.sharded import backward, mesh_2d, mesh_of, same, shard, train, weights
from ...kit.versions import sharded_models
from ..fake_time import TimelessLink

STEPS = WARM_UP + 2 * len(KINDS) + 1
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def deep(ranks: Ranks, **options: Any) -> Any:
    return shard(seeded(models.Deep), mesh_of(ranks), **options)


def accumulating(model: Any, rank: int, step: int) -> None:
    """Two backward passes, the first one without reductions."""
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model(batch(rank, step)).square().mean().backward()


MODES = {
    "plain": ({}, backward),
    "mixed precision": ({"mp_policy": BF16}, backward),
    "not resharded": ({"reshard_after_forward": False}, backward),
    "accumulating": ({}, accumulating),
}


@sharded_models
@on_ranks(2)
def test_the_training_is_the_same_bit_for_bit(ranks: Ranks) -> None:
    for mode in MODES:
        check_same(ranks, mode)


def check_same(ranks: Ranks, mode: str) -> None:
    options, run = MODES[mode]
    wanted = deep(ranks, **options)
    train(wanted, ranks.rank, STEPS, run)
    model, published = deep(ranks, **options), list[Any]()
    AlternatingSharded(model, ShardedClock(8, lambda times, timeline: published.append((list(times), timeline))), None)
    train(model, ranks.rank, STEPS, run)
    assert same(weights(model), weights(wanted))
    times, timeline = published[-1]
    assert [len(each) for each, _ in published] == [4, 8]
    assert min(times) > 0
    counted = Counter(event.what for event in timeline.events)
    passes = 2 if run is accumulating else 1
    assert counted["gather"] == counted["need"] == passes * (3 if mode == "not resharded" else 6)
    assert counted["reduce"] + counted["reduce_late"] == 3
    assert (counted["reduce"] > 0) == (mode == "mixed precision")  # it converts the result
    assert [event.at_s for event in timeline.events] == sorted(event.at_s for event in timeline.events)


@sharded_models
@on_ranks(2)
def test_each_kind_of_step_has_the_time_of_what_it_has_left(ranks: Ranks) -> None:
    """On a clock that only the emulated link moves on."""
    link, published = TimelessLink(Link(10e6)), list[Any]()
    model = deep(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alternate, "now", lambda device: link.clock.now)
        patch.setattr(alternate_sharded, "perf_counter", lambda: link.clock.now)
        AlternatingSharded(model, ShardedClock(8, lambda times, _: published.append(list(times))), link)
        train(model, ranks.rank, STEPS)
    row_s = sum(param.numel() for param in model.parameters()) / 2 * 4 * 8 / 10e6 / PAYLOAD
    takes = {alternate_sharded.GATHERS: 2 * row_s, alternate_sharded.REDUCTIONS: 2 * row_s}
    wanted = [sum(takes[part] for part in takes.keys() - KINDS[kind_of(at)]) for at in range(8)]
    assert published[-1] == pytest.approx(wanted, rel=1e-6)


@sharded_models
@on_ranks(4)
def test_averages_across_replicas_are_timed_and_leave_the_training_as_it_is(ranks: Ranks) -> None:
    """On FSDP2's own HSDP, and a clock that only the emulated link moves on: the one between the replicas."""
    wanted = shard(seeded(models.Deep), mesh_2d(ranks, 2))
    train(wanted, ranks.rank, STEPS)
    link, published = TimelessLink(Link(10e6)), list[Any]()
    model = shard(seeded(models.Deep), mesh_2d(ranks, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alternate, "now", lambda device: link.clock.now)
        patch.setattr(alternate_sharded, "perf_counter", lambda: link.clock.now)
        clock = ShardedClock(8, lambda times, timeline: published.append((list(times), timeline)))
        timed = AlternatingSharded(model, clock, link)
        train(model, ranks.rank, STEPS)
    assert same(weights(model), weights(wanted))
    assert (timed.rank, timed.ranks) == (ranks.rank, 4)
    across_s = sum(param.numel() for param in model.parameters()) / 2 * 4 * 8 / 10e6 / PAYLOAD
    times, timeline = published[-1]
    expected = [0.0 if REPLICAS in REPLICA_KINDS[kind_of(at)] else across_s for at in range(8)]
    assert times == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert Counter(event.what for event in timeline.events)["gather"] == 6


@sharded_models
@on_ranks(4)
def test_a_script_that_uses_gradwire_itself_is_told_what_to_use_instead(ranks: Ranks) -> None:
    model = seeded(models.Deep)
    ranks.hooks.append(gradwire.hsdp(model, mesh_2d(ranks, 2), units=list(model.layers), replicas="int8"))  # type: ignore[arg-type,union-attr]
    with pytest.raises(gradwire.RegisterError, match=r"instead of gradwire.hsdp call fully_shard with the 2-D mesh"):
        AlternatingSharded(model, ShardedClock(8, lambda *unused: None), None)


@sharded_models
@on_ranks(2)
def test_an_emulated_link_slows_down_what_fsdp2_sends_itself(ranks: Ranks) -> None:
    link, model = TimelessLink(Link(10e6)), deep(ranks)
    with emulate(link):
        hook = gradwire.register(model, "exact")
    began = link.clock.now  # the ranks agree on a hook over the same link
    backward(model, ranks.rank, 0)
    assert link.clock.now - began == pytest.approx(hook.stats().sent_bytes * 8 / 10e6 / PAYLOAD)
    hook.close()


# -- kinds and timelines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 4])
def test_what_a_script_does_every_few_steps_favours_no_kind(period: int) -> None:
    for phase in range(period):
        seen = Counter(kind_of(at) for at in range(64) if at % period == phase)
        assert set(seen.values()) == {64 // period // len(KINDS)}


def test_every_kind_comes_before_every_other_equally_often_within_rounds() -> None:
    rounds = [[kind_of(4 * number + place) for place in range(4)] for number in range(8)]
    seen = Counter(pair for each in rounds for pair in itertools.pairwise(each))
    assert set(seen.values()) == {2}
    assert len(seen) == 12


def test_a_typical_step_is_the_median_of_those_with_the_same_events() -> None:
    def step(step_s: float, took_s: float, *more: Event) -> Timeline:
        return Timeline(step_s, (Event("gather", 0, 0.0, took_s), Event("need", 0, step_s / 2, 0.0), *more))

    found = typical([step(1, 5), step(3, 1), step(9, 9, Event("end", 0, 9, 0)), step(2, 3)])
    assert found == step(2, 3)
    assert typical([]) is None


def test_the_table_has_both_directions() -> None:
    times = {"with_s": 0.1, "without_s": 0.02, "without_gathers_s": 0.07, "without_reductions_s": 0.05}
    result = Headroom(ranks=2, link=None, wanted_steps=80, **{name: (value,) * 20 for name, value in times.items()})
    lines = [line.split("  ") for line in to_text(result).splitlines()]
    assert lines[7][:2] == ["", "reductions of gradients"]
    assert "50.00" in lines[7]
    assert lines[7][-1] == "50.0% of a step"
    assert lines[8][:2] == ["", "gathers of parameters"]
    assert lines[8][-1] == "30.0% of a step"
    told = result.as_dict()
    assert told["gathers_s"] == pytest.approx(0.03)
    assert told["without_reductions"]["median_s"] == 0.05


def test_the_table_of_a_model_with_replicas_has_three_parts() -> None:
    times = {"with_s": 0.1, "without_s": 0.02, "without_gathers_s": 0.09, "without_replicas_s": 0.05}
    result = Headroom(ranks=4, link=None, wanted_steps=80, **{name: (value,) * 20 for name, value in times.items()})
    assert result.is_replicated
    assert result.parts_s() == pytest.approx({"reductions": 0.02, "gathers": 0.01, "replicas": 0.05})
    text = to_text(result)
    assert [line.strip().partition("  ")[0] for line in text.splitlines()][2:10] == [
        "with communication",
        "without gathers",
        "without replicas",
        "without communication",
        "exposed communication",
        "reductions of gradients",
        "gathers of parameters",
        "averages across replicas",
    ]
    told = result.as_dict()
    assert told["replicas_s"] == pytest.approx(0.05)
    assert told["without_replicas"]["median_s"] == 0.05
    assert "without_reductions" not in told
