"""What an engine costs as the number of ranks grows: the formulas of docs/engine.md that are exact."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from gradwire.engine.gloo import FAR_S, FAR_THREADS, THREADS, jobs_in_flight
from gradwire.engine.lanes import Lanes, slow_link

from ..kit.models import seeded
from ..kit.ranks import Ranks, on_ranks

WIDTH = 64


def sockets() -> int:
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(str(link).startswith("socket:") for link in links)


def workers() -> int:
    return sum(thread.name.startswith("gradwire-") for thread in threading.enumerate())


def layers(count: int) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))))


def step(model: Any) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()


@on_ranks(2, 3, 4, specs=("exact", "int8", "powersgd:rank=1,sides=one"))
def test_sockets_threads_and_bytes_follow_their_formulas(ranks: Ranks) -> None:
    """A lane connects to every other rank twice, gloo listens on one socket, and nothing else depends on the ranks."""
    buckets = 12
    model = ranks.wrap(layers(buckets), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    before = sockets(), workers()
    hook = ranks.register(model)
    step(model)
    hook.reset_stats()
    step(model)
    assert sockets() - before[0] == hook.exchange.lanes * (2 * ranks.size - 1)
    assert 0 < workers() - before[1] <= hook.runner.in_flight
    share = 2 * (ranks.size - 1) / ranks.size
    values = buckets * WIDTH * WIDTH
    if ranks.spec == "exact":
        assert hook.stats().sent_bytes == 4 * values * share
    elif ranks.spec == "int8":
        assert values * share < hook.stats().sent_bytes < 1.2 * values * share  # scales, and blocks that are not full
    else:
        assert 4 * buckets * WIDTH * share <= hook.stats().sent_bytes < 1.2 * 4 * buckets * WIDTH * share


@on_ranks(2, 3, specs=("exact", "int8", "powersgd:rank=1"))
def test_the_latencies_of_eight_buckets_overlap(ranks: Ranks) -> None:
    """As many buckets wait for a slow link at the same time, so that a step costs the round trips of one."""
    model = ranks.wrap(layers(THREADS), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    hook = ranks.register(model)
    step(model)  # DDP cuts its buckets after the first step
    hook.reset_stats()
    step(model)
    assert hook.stats().buckets == THREADS
    together, passed = threading.Barrier(THREADS), []

    def hold(*_: object) -> float:
        passed.append(together.wait(timeout=30))  # raises unless all of them are in flight
        return 0.0

    hook.runner.lanes.hold = hold  # type: ignore[attr-defined]
    step(model)
    each = 1 if ranks.size == 2 and ranks.spec == "int8" else hook.exchange.lanes
    assert len(passed) == THREADS * each


@on_ranks(2, 3, specs=("exact", "int8", "powersgd:rank=1"))
def test_on_a_link_with_a_high_latency_all_buckets_of_a_step_wait_together(ranks: Ranks) -> None:
    """Registration measures the latency. So 32 buckets cost as many round trips as one: those of its collectives."""
    buckets = 4 * THREADS
    model = ranks.wrap(layers(buckets), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    token = slow_link.set(lambda *_: 2 * FAR_S)  # as if it had slept for so long
    try:
        hook = ranks.register(model)
    finally:
        slow_link.reset(token)
    assert hook.runner.in_flight == FAR_THREADS
    step(model)
    hook.reset_stats()
    step(model)
    assert hook.stats().buckets == buckets
    together, round_trips = threading.Barrier(buckets), []

    def hold(*_: object) -> float:
        if together.wait(timeout=30) == 0:  # raises unless all of them are in flight
            round_trips.append(1)
        return 0.0

    hook.runner.lanes.hold = hold  # type: ignore[attr-defined]
    step(model)
    assert len(round_trips) == (1 if ranks.size == 2 and ranks.spec == "int8" else hook.exchange.lanes)


class Pair:
    """A group in which the other rank has seen a message take so long."""

    def __init__(self, other_s: float) -> None:
        self.other_s = other_s

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Pair:
        out[0], out[1] = tensor[0], self.other_s
        return self

    def wait(self) -> None:
        """It is done."""


def test_the_shortest_time_of_any_rank_is_the_latency() -> None:
    """A rank that is late, because its machine is busy, does not make a link slow."""
    lanes = Lanes(HashStore(), 0, 2, timedelta(seconds=5), "pair")
    lanes.hold = lambda *_: 2 * FAR_S
    assert lanes._latency_s(Pair(1e-3)) == pytest.approx(1e-3)
    assert lanes._latency_s(Pair(3600.0)) >= 2 * FAR_S
    assert (jobs_in_flight(1e-3), jobs_in_flight(2 * FAR_S)) == (THREADS, FAR_THREADS)
