"""On the path of a gradient the host waits for the device no more often than with plain DDP."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradwire.exchanges import registered
from gradwire.testing import device

from ..kit.ranks import Ranks
from .kit import on_device, sgd, step, wrap

POWER_SGD = "powersgd:rank=1,min_compression=0.5"
SPECS = (
    *(name for name in registered() if name not in ("powersgd", "two_level")),
    "int8:feedback=true,exempt=none",
    "int4:rounding=stochastic",
    POWER_SGD,
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


@on_device(2)
def test_a_planted_synchronisation_is_counted(ranks: Ranks) -> None:
    plain, model = waits(ranks, None), wrap(ranks, "testdev")
    hook, optimizer = ranks.register(model, "exact", bucket_mb=0.002), sgd(model.parameters())
    hook.before_mean = lambda bucket, first: bucket.flat.sum().item()
    seen = []
    for number in range(4):
        device.reset_counters()
        step(model, optimizer, ranks.rank, number)
        seen.append(device.counters().reasons)
    assert seen != plain
