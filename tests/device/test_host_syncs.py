"""On the path of a gradient the host waits for the device no more often than with plain DDP."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import gradwire
from gradwire.engine.observers import Observer
from gradwire.exchanges import registered
from gradwire.metrics import Record, Sink
from gradwire.testing import device

from ..kit.ranks import Ranks
from .kit import on_device, sgd, step, wrap

POWER_SGD = "powersgd:rank=1,min_compression=0.5"
SPECS = (
    *(name for name in registered() if name not in ("powersgd", "two_level")),
    "int8:feedback=true,exempt=none",
    "int4:rounding=stochastic",
    POWER_SGD,
    f"{POWER_SGD},sides=one",
)


def waits(ranks: Ranks, spec: str | None, steps: int = 4) -> list[Mapping[str, int]]:
    """Why the host waited, in each step."""
    model = wrap(ranks, "testdev")
    hook = None if spec is None else ranks.register(model, spec, bucket_mb=0.002)
    optimizer, seen = sgd(model.parameters()), []
    for number in range(steps):
        device.reset_counters()
        step(model, optimizer, ranks.rank, number)
        seen.append(device.counters().reasons)
    if hook is not None:
        hook.stats()
        assert device.counters().reasons == seen[-1], "stats() synchronised"
    torch.accelerator.synchronize()
    return seen


@on_device(2)
def test_no_exchange_waits_more_often_than_plain_ddp(ranks: Ranks) -> None:
    plain = waits(ranks, None)
    assert sum(map(len, plain)) > 0, "DDP re-cuts its buckets in the second step, and waits for it"
    for spec in SPECS:
        assert waits(ranks, spec) == plain, spec


@on_device(4)
def test_two_levels_wait_no_more_often(ranks: Ranks) -> None:
    assert waits(ranks, "two_level:node=2") == waits(ranks, None)


class Last(Sink):
    """Keeps the last record."""

    def write(self, record: Record) -> None:
        self.record = record


@on_device(2)
def test_metrics_wait_in_recorded_steps_only_and_the_norm_of_the_gradients_never(ranks: Ranks) -> None:
    plain, model, sink = waits(ranks, None), wrap(ranks, "testdev"), Last()
    hook, optimizer = ranks.register(model, POWER_SGD, bucket_mb=0.002), sgd(model.parameters())
    gradwire.metrics.record(hook, sink, every=4)
    for number in range(4):
        device.reset_counters()
        step(model, optimizer, ranks.rank, number)
        norm = hook.grad_norm()
        assert number == 3 or device.counters().reasons == plain[number]
    total = torch.cat([param.grad.cpu().flatten() for param in model.parameters()]).norm()
    assert torch.allclose(norm.cpu(), total)
    if ranks.rank == 0:
        assert abs(sink.record.values["grad_norm"] / float(total) - 1) < 1e-5
        assert sink.record.values["residual_norm"] > 0


class Reading(Observer):
    def before_mean(self, bucket: gradwire.Bucket, first: bool) -> None:
        bucket.flat.sum().item()


@on_device(2)
def test_a_planted_synchronisation_is_counted(ranks: Ranks) -> None:
    plain, model = waits(ranks, None), wrap(ranks, "testdev")
    hook, optimizer = ranks.register(model, "exact", bucket_mb=0.002), sgd(model.parameters())
    hook.observers.append(Reading())
    seen = []
    for number in range(4):
        device.reset_counters()
        step(model, optimizer, ranks.rank, number)
        seen.append(device.counters().reasons)
    assert seen != plain
