"""Times on an accelerator: from events on its streams, on the simulated clock of the test device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.auto.pilot import Pilot
from gradwire.auto.settings import Auto
from gradwire.engine.events import EventMeter, now, seconds
from gradwire.engine.stats import Stats
from gradwire.exchanges import make_bucket
from gradwire.models.ddp import make_hook
from gradwire.testing import device
from gradwire.tools.measure.alternate import WARM_UP, Alternating, Clock, alternating_hook
from gradwire.tools.measure.survey import Survey

from ..kit.ranks import Ranks
from .kit import on_device, sgd, step, weights, wrap

FREE = {"launch_us": 0.0, "bytes_per_us": math.inf, "collective_us": 0.0, "link_bytes_per_us": math.inf}


def here() -> torch.device:
    return torch.device(device.DEVICE, 0)


@contextmanager
def costing(**costs: float) -> Iterator[None]:
    """What is not named costs nothing."""
    torch.accelerator.synchronize()
    device.set_costs(**{**FREE, **costs})
    yield
    torch.accelerator.synchronize()
    device.set_costs()


def measured(ranks: Ranks, spec: str, steps: int = 3, **costs: float) -> Stats:
    """What a hook says after some steps that the device has finished."""
    model = wrap(ranks, device.DEVICE)
    hook = ranks.register(model, spec)
    optimizer = sgd(model.parameters())
    step(model, optimizer, ranks.rank, 0)  # DDP rebuilds its buckets after the first step
    hook.reset_stats()
    with costing(**costs):
        for number in range(steps):
            step(model, optimizer, ranks.rank, number)
        torch.accelerator.synchronize()
        return hook.stats()


# -- stats() -----------------------------------------------------------------------------------------------------------


@on_device(2, 3, specs=("int8", "exact", "int4:feedback=true", "powersgd:rank=1,min_compression=0.5"))
def test_wire_time_is_that_of_the_collectives(ranks: Ranks) -> None:
    stats = measured(ranks, ranks.spec, collective_us=1000.0)
    exchange = ranks.exchange
    each = exchange.lanes if ranks.size > 2 or exchange.name == "powersgd" else 1
    assert stats.timed_steps == stats.steps == 3
    assert stats.wire_s == pytest.approx(1e-3 * each * stats.buckets)
    assert (stats.encode_s, stats.decode_s) == (0.0, 0.0)


@on_device(2, specs=("int8", "bf16:shots=two"))
def test_encoding_and_decoding_take_the_time_of_their_kernels(ranks: Ranks) -> None:
    once, twice = (measured(ranks, ranks.spec, launch_us=cost) for cost in (10.0, 20.0))
    assert min(once.encode_s, once.decode_s) > 0
    assert (twice.encode_s, twice.decode_s) == pytest.approx((2 * once.encode_s, 2 * once.decode_s))
    assert once.wire_s == 0.0
    assert round(once.encode_s * 1e6) % 10 == 0  # whole launches


@on_device(2, specs=("exact",))
def test_the_exposed_wait_is_from_the_last_gradient_to_the_last_result(ranks: Ranks) -> None:
    """Compute is free here, so all buckets arrive at once, and their collectives take turns on the wire."""
    stats = measured(ranks, ranks.spec, collective_us=500.0)
    assert stats.buckets > 1
    assert stats.wait_s == pytest.approx(stats.buckets * 500e-6)


@on_device(2, specs=("int8",))
def test_stats_wait_for_nothing(ranks: Ranks) -> None:
    model = wrap(ranks, device.DEVICE)
    hook = ranks.register(model)
    optimizer = sgd(model.parameters())
    for number in range(3):
        step(model, optimizer, ranks.rank, number)
    hook.reset_stats()
    torch.accelerator.synchronize()
    device.reset_counters()
    for number in range(3):
        step(model, optimizer, ranks.rank, number)
        stats = hook.stats()
        assert (stats.steps, stats.timed_steps) == (number + 1, 0)  # under `lazy` nothing has run yet
        assert all(math.isnan(value) for value in (stats.encode_s, stats.wire_s, stats.decode_s, stats.wait_s))
        assert stats.sent_bytes > 0
    assert device.counters().host_syncs == 0, device.counters().reasons
    torch.accelerator.synchronize()
    stats = hook.stats()
    assert (stats.timed_steps, stats.kernels) == (3, "torch")
    assert min(stats.encode_s, stats.wire_s, stats.decode_s, stats.wait_s) > 0
    assert hook.stats() == stats
    step(model, optimizer, ranks.rank, 3)
    later = hook.stats()  # the times of the finished steps stay
    assert (later.timed_steps, later.steps, later.wire_s) == (3, 4, stats.wire_s)


@on_device(2, specs=("int8",))
def test_events_are_used_again_and_never_more_than_the_limit(ranks: Ranks) -> None:
    hook = make_hook(ranks.exchange, ranks.group, here())
    hook.runner.meter = meter = EventMeter(here(), most_events=12)

    def steps(count: int) -> None:
        for _ in range(count):
            bucket = make_bucket([torch.ones(1000, device=here())])
            hook.begin(bucket)
            hook.mean(bucket)

    for _ in range(10):
        steps(1)
        torch.accelerator.synchronize()
    assert hook.stats().timed_steps == 10
    assert meter._made <= 10  # two steps of five events
    hook.reset_stats()
    steps(50)  # far ahead of the device
    assert meter._made == 12
    torch.accelerator.synchronize()
    stats = hook.stats()
    assert (stats.steps, stats.timed_steps) == (50, 2)  # only two steps found five events each
    steps(2)
    torch.accelerator.synchronize()
    assert hook.stats().timed_steps == 4
    assert len(meter._free) == meter._made
    hook.close()


@on_device(2, specs=("int8",))
def test_a_bucket_is_one_job_unless_chunks_are_asked_for(ranks: Ranks) -> None:
    for chunk_bytes, collectives in ((None, 1), (1 << 20, 8)):
        hook = make_hook(ranks.exchange, ranks.group, here(), chunk_bytes)
        bucket = make_bucket([torch.ones(1 << 21, device=here())])
        torch.accelerator.synchronize()
        device.reset_counters()
        hook.begin(bucket)
        hook.mean(bucket)
        assert device.counters().collectives == collectives
        torch.accelerator.synchronize()
        assert hook.stats().timed_steps == 1
        hook.close()


@on_device(1)
def test_moments_are_places_in_a_stream(ranks: Ranks) -> None:
    with costing(launch_us=100.0):
        began = now(here())
        values = torch.ones(10, device=here())
        ended = now(here())
        assert not ended.query()
        assert seconds(began, ended) == pytest.approx(100e-6)
        assert values.cpu().tolist() == [1.0] * 10
    assert seconds(1.0, 3.5) == 2.5


# -- auto, headroom and advise ----------------------------------------------------------------------------------------


def train_until(hook: gradwire.Hook, model: DDP, rank: int, most: int, done: Any) -> int:
    optimizer = sgd(model.parameters())
    for number in range(most):
        step(model, optimizer, rank, number)
        if done():
            return number + 1
    raise AssertionError(f"not done after {most} steps: {hook.stats().reason}")


@on_device(2)
def test_auto_picks_by_the_time_of_the_device(ranks: Ranks) -> None:
    """The host's clock, which sees neither the link nor the kernels, could not tell these two apart."""
    settings = Auto(hooks=("int8",), max_error=0.1)  # type: ignore[arg-type]
    for costs, pick in (({"link_bytes_per_us": 1.0}, "int8"), ({"launch_us": 50.0}, "exact")):
        model = wrap(ranks, device.DEVICE)
        hook = ranks.register(model, "exact")
        hook.pilot = Pilot(hook, settings)
        with costing(**costs):
            train_until(hook, model, ranks.rank, 150, lambda hook=hook: hook.pilot.reason != "measuring")
        assert hook.stats().hook == pick, hook.stats().reason
        assert "ms per step of the slowest rank" in hook.stats().reason
        torch.accelerator.synchronize()


def headroom_of(ranks: Ranks, steps: int, **costs: float) -> tuple[list[float], DDP, Any]:
    """Timed steps, with and without communication by turns, and the model that was trained."""
    model, seen = wrap(ranks, device.DEVICE), []
    clock = Clock(steps, lambda times, backward: seen.append((list(times), backward)))
    model.register_comm_hook(Alternating(model, clock, None), alternating_hook)
    optimizer = sgd(model.parameters())
    with costing(**costs):
        for number in range(WARM_UP + steps + 2):
            step(model, optimizer, ranks.rank, number)
    return seen[-1][0], model, seen[-1][1]


@on_device(2)
def test_headroom_is_the_time_of_the_collectives(ranks: Ranks) -> None:
    """Compute takes no time here: with communication a step is its collectives, without it is nothing."""
    device.reset_counters()
    times, model, backward = headroom_of(ranks, 8, collective_us=1000.0)
    buckets = len(backward.came_s) and round(times[0] / 1e-3)
    assert buckets > 1
    kinds = [True, False, False, True, False, True, True, False]
    assert times == pytest.approx([1e-3 * buckets * kind for kind in kinds], abs=1e-9)
    plain = wrap(ranks, device.DEVICE)
    optimizer = sgd(plain.parameters())
    for number in range(WARM_UP + 8 + 2):
        step(plain, optimizer, ranks.rank, number)
    for mine, theirs in zip(weights(model).values(), weights(plain).values(), strict=True):
        assert torch.equal(mine, theirs)


@on_device(2)
def test_headroom_waits_for_the_device_once_per_round(ranks: Ranks) -> None:
    model = wrap(ranks, device.DEVICE)
    optimizer = sgd(model.parameters())
    device.reset_counters()
    for number in range(WARM_UP + 8 + 2):
        step(model, optimizer, ranks.rank, number)
    plain = device.counters().reasons
    device.reset_counters()
    headroom_of(ranks, 8, collective_us=10.0)
    more = {reason: count - plain.get(reason, 0) for reason, count in device.counters().reasons.items()}
    more.pop("copy to the host")  # DDP's constructor compares the shapes of all ranks
    # In each of two rounds: its last event, and the times of the slowest rank. `costing` synchronises twice.
    assert more == {"event.synchronize": 2, "item": 2, "synchronize": 2}


@on_device(2)
def test_a_survey_measures_and_predicts_on_the_device(ranks: Ranks) -> None:
    """Large enough that the bytes decide, on a link of 1 byte per microsecond: int8 sends a quarter."""
    module = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    model = wrap(ranks, device.DEVICE, module, bucket_cap_mb=None)
    hook, results = ranks.register(model, "exact"), []
    settings = Auto(hooks=("bf16", "int8"), max_error=0.1, recheck=1 << 60)  # type: ignore[arg-type]
    compute = {"forward_s": 0.0, "backward_s": 1e-3, "came_s": {}, "cores": 1.0, "threads": 1}
    hook.pilot = Survey(hook, settings, compute=compute, link=None, publish=results.append, count=lambda steps: None)
    with costing(link_bytes_per_us=1.0, launch_us=1.0):
        train_until(hook, model, ranks.rank, 120, lambda: results)
    rows = {row["hook"]: row for row in results[0]["rows"]}
    assert list(rows) == ["exact", "bf16", "int8"]
    for kind in ("measured_s", "predicted_s"):
        assert rows["exact"][kind] > rows["bf16"][kind] > rows["int8"][kind] > 0
    assert rows["exact"]["measured_s"] == pytest.approx(rows["exact"]["predicted_s"], rel=0.3)
    wire = {name: row["split"]["wire_s"] for name, row in rows.items()}
    assert wire["exact"] > wire["bf16"] > wire["int8"] > 0
