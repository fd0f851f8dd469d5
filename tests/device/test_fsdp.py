"""Models with `fully_shard` on the device: the bits of the CPU engine under every schedule, and mutants of the streams.

FSDP2 has streams of its own: it copies into messages on one, gathers on a second, reduces on a third and averages
across replicas on a fourth. The engine's side streams must wait for them, and they for the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire
from gradwire._torch.fsdp import Waited, local_values
from gradwire.engine.sharded import ShardedHook
from gradwire.engine.stream import done
from gradwire.models import fsdp
from gradwire.testing import device

from ..kit.models import Deep, batch, seeded
from ..kit.ranks import Ranks
from ..kit.sharded import mesh_2d, mesh_of, shard
from ..kit.trial import loss, through_a_file
from ..kit.versions import sharded_models
from .kit import check_bits, following, on_device, same_bits, sgd, torch_kernels
from .test_stream import SCHEDULES, WAIT, completed_early, edited, is_rejected

pytestmark = sharded_models

FEEDBACK = "int4:feedback=true,exempt=none"
POWER_SGD = "powersgd:rank=1,min_compression=0.5"
SPECS = ("exact", "bf16", "int8", "int4:rounding=stochastic,exempt=none", FEEDBACK, f"{FEEDBACK},residual=int8")
GATHERS = ("exact/bf16", "int8/int8", "bf16/fp8")
"""A spec, and what parameters are gathered with."""


def build(ranks: Ranks, place: str, name: str, **options: Any) -> tuple[Any, ShardedHook]:
    """A model on the device and its hook. `name` is spec/gather/replicas; with replicas there are two."""
    spec, _, rest = name.partition("/")
    gather, _, replicas = rest.partition("/")
    gather = gather or "exact"
    model: Any = seeded(Deep, 3).to(place)
    chunk_bytes = options.pop("chunk_bytes", None)
    if replicas:
        hook = gradwire.hsdp(
            model, mesh_2d(ranks, 2, place), spec, units=model.layers, gather=gather, replicas=replicas, **options
        )
    else:
        shard(model, mesh_of(ranks, place=place), **options)
        hook = gradwire.register(model, spec, gather=gather, chunk_bytes=chunk_bytes)
    ranks.hooks.append(hook)
    assert isinstance(hook, ShardedHook)
    return model, hook


def step(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss(model(batch(rank, number).to(optimizer.param_groups[0]["params"][0].device)).float()).backward()
    optimizer.step()


def kept(model: Any, hook: ShardedHook) -> dict[str, Tensor]:
    """This rank's shards, and what the hook keeps between steps, on the CPU."""
    state = hook.state_dict()
    parts = [state["residuals"], state.get("replicas", {}).get("residuals", {})]
    residuals = {f"residual {i} of {name}": value.cpu() for i, part in enumerate(parts) for name, value in part.items()}
    return {name: local_values(param.detach()).cpu().clone() for name, param in model.named_parameters()} | residuals


def trained(ranks: Ranks, place: str, name: str, steps: int = 2, **options: Any) -> dict[str, Tensor]:
    model, hook = build(ranks, place, name, **options)
    optimizer = sgd(model.parameters())
    for number in range(steps):
        step(model, optimizer, ranks.rank, number)
    made = kept(model, hook)
    hook.close()
    return made


# -- the same bits -----------------------------------------------------------------------------------------------------


@on_device(2, specs=(*SPECS, *GATHERS))
def test_shards_are_those_of_the_cpu_engine(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place, ranks.spec))


@on_device(3, specs=("int8/int8",))
def test_uneven_shards(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place, ranks.spec))


@on_device(4, specs=("exact/exact/int4", f"int8/bf16/{FEEDBACK}", f"exact/exact/{POWER_SGD}"))
def test_hsdp(ranks: Ranks) -> None:
    with torch_kernels() if "powersgd" in ranks.spec else nullcontext():
        same_bits(ranks, lambda place: trained(ranks, place, ranks.spec))


@on_device(4, specs=("int8/int8",))
def test_parameters_that_stay_on_fewer_ranks_after_forward(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place, ranks.spec, reshard_after_forward=2))


@on_device(2, specs=("int8/int8", f"{FEEDBACK}/bf16"))
def test_mixed_precision_and_messages_in_chunks(ranks: Ranks) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    same_bits(ranks, lambda place: trained(ranks, place, ranks.spec, mp_policy=policy, chunk_bytes=1024))


@on_device(2, specs=(f"{FEEDBACK}/int8",))
def test_accumulation_with_and_without_communication(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model, hook = build(ranks, place, ranks.spec)
        optimizer = sgd(model.parameters())
        for number in range(2):
            optimizer.zero_grad()
            for part, reduces in enumerate((False, True, True)):
                model.set_requires_gradient_sync(reduces)
                loss(model(batch(ranks.rank, 10 * number + part).to(place))).backward()
            optimizer.step()
        return kept(model, hook)

    same_bits(ranks, run)


@on_device(2)
def test_switch_verify_prefetching_and_a_checkpoint(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model, hook = build(ranks, place, f"{FEEDBACK}/int8")
        for one, other in zip(model.layers, model.layers[1:], strict=False):
            one.set_modules_to_forward_prefetch([other])
        optimizer = sgd(model.parameters())
        step(model, optimizer, ranks.rank, 0)
        hook.load_state_dict(through_a_file(hook.state_dict()))
        step(model, optimizer, ranks.rank, 1)
        hook.switch("exact", gather="bf16")
        step(model, optimizer, ranks.rank, 2)
        hook.switch("int8")
        step(model, optimizer, ranks.rank, 3)
        hook.verify()
        return kept(model, hook)

    same_bits(ranks, run)


# -- the host ----------------------------------------------------------------------------------------------------------


def waits(ranks: Ranks, name: str | None, steps: int = 3) -> list[Mapping[str, int]]:
    """Why the host waited, in each step."""
    if name is None:
        model = shard(seeded(Deep, 3).to("testdev"), mesh_of(ranks, place="testdev"))
    else:
        model, _ = build(ranks, "testdev", name)
    optimizer, seen = sgd(model.parameters()), []
    for number in range(steps):
        device.reset_counters()
        step(model, optimizer, ranks.rank, number)
        seen.append(device.counters().reasons)
    torch.accelerator.synchronize()
    return seen


@on_device(2)
def test_the_host_waits_no_more_often_than_with_plain_fsdp2(ranks: Ranks) -> None:
    plain = waits(ranks, None)
    for name in (*SPECS, *GATHERS):
        assert waits(ranks, name) == plain, name


@on_device(2)
def test_stats_have_the_times_of_the_device(ranks: Ranks) -> None:
    model, hook = build(ranks, "testdev", "int8/int8")
    optimizer = sgd(model.parameters())
    for number in range(3):
        step(model, optimizer, ranks.rank, number)
    torch.accelerator.synchronize()
    for name, part in hook.stats_by_part().items():
        assert part.steps == 3, name
        assert part.encode_s > 0, name
        assert part.wire_s > 0, name
        assert part.decode_s > 0, name


# -- mutants -----------------------------------------------------------------------------------------------------------


def all_parts(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place, f"{FEEDBACK}/int8"), SCHEDULES)


def all_parts_in_many_orders(ranks: Ranks) -> None:
    """The other schedules treat FSDP2's streams and the engine's alike. Here one of them may be ahead of the other."""
    wanted = trained(ranks, "cpu", f"{FEEDBACK}/int8")
    for seed in range(6):
        with following("shuffled", seed):
            check_bits(trained(ranks, "testdev", f"{FEEDBACK}/int8"), wanted, f"shuffled, seed {seed}")


def replicas(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place, f"exact/exact/{FEEDBACK}"), SCHEDULES)


CHECKS = (all_parts, replicas, all_parts_in_many_orders)


def a_gather_that_nobody_waits_for() -> AbstractContextManager[object]:
    return mock.patch.object(fsdp, "Waited", return_value=Waited(lambda: None))


def a_reduction_that_nobody_waits_for() -> AbstractContextManager[object]:
    scatter = ShardedHook.scatter

    def mutant(self, index, rows, out, *rest):  # type: ignore[no-untyped-def]
        scatter(self, index, rows, out, *rest)
        return done(out)

    return mock.patch.object(ShardedHook, "scatter", mutant)


def an_average_that_nobody_waits_for() -> AbstractContextManager[object]:
    mean = gradwire.Hook.mean

    def mutant(self, bucket, *rest, **options):  # type: ignore[no-untyped-def]
        mean(self, bucket, *rest, **options)
        return done(bucket.flat)

    return mock.patch.object(gradwire.Hook, "mean", mutant)


MUTANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "the side stream does not wait for FSDP2's": lambda: edited(WAIT, "pass"),
    "collectives are not waited for": lambda: edited("issue(TorchGroup(group)).wait()", "issue(TorchGroup(group))"),
    "a future without devices": lambda: edited("Future(devices=[device])", "Future()"),
    "every future is complete too early": completed_early,
    "a gather that nobody waits for": a_gather_that_nobody_waits_for,
    "a reduction that nobody waits for": a_reduction_that_nobody_waits_for,
    "an average across replicas that nobody waits for": an_average_that_nobody_waits_for,
}


@on_device(2, specs=tuple(MUTANTS))
def test_every_mutant_is_rejected(ranks: Ranks) -> None:
    with MUTANTS[ranks.spec]():
        assert any(is_rejected(ranks, check) for check in CHECKS)


@on_device(2)
def test_the_sharded_hook_as_it_is_passes_all_checks(ranks: Ranks) -> None:
    for check in CHECKS:
        check(ranks)
