"""Checkpoints of models with `fully_shard`: exact on the same mesh, by the sum of residuals on another one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradwire
from gradwire import StateError
from gradwire.engine.fingerprint import sealed

from ..kit import models
from ..kit.models import seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import backward, mesh_2d, mesh_of, same, shard, weights
from ..kit.trial import raised
from ..kit.versions import sharded_models

pytestmark = sharded_models

SPECS = ("int4:feedback=true,exempt=none", "int4:feedback=true,exempt=none,residual=int8")


def build(ranks: Ranks, spec: str, gather: str = "int8") -> tuple[Any, Any, Any]:
    model = shard(seeded(models.Deep), mesh_of(ranks))
    hook = ranks.register(model, spec, gather=gather)
    return model, hook, torch.optim.AdamW(model.parameters(), lr=0.01)


def build_hsdp(ranks: Ranks, replicas: int, spec: str = "int4:feedback=true,exempt=none") -> tuple[Any, Any, Any]:
    module = seeded(models.Deep)
    hook = gradwire.hsdp(module, mesh_2d(ranks, replicas), spec, units=module.layers, replicas=ranks.spec or spec)
    ranks.hooks.append(hook)
    return module, hook, torch.optim.AdamW(module.parameters(), lr=0.01)


def run(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def save(folder: Any, model: Any, hook: Any, optimizer: Any, key: str, **options: Any) -> None:
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim, "gradwire": {key: hook.state_dict(**options)}}, checkpoint_id=folder)


def load(folder: Any, model: Any, hook: Any, optimizer: Any, key: str, **options: Any) -> None:
    state, optim = get_state_dict(model, optimizer)
    saved = {"model": state, "optim": optim, "gradwire": {key: hook.state_dict(**options)}}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
    hook.load_state_dict(saved["gradwire"][key])


@on_ranks(2, specs=SPECS)
def test_resuming_on_the_same_mesh_is_exact(ranks: Ranks) -> None:
    own = f"rank{ranks.rank}"
    model, hook, optimizer = build(ranks, ranks.spec)
    run(model, optimizer, ranks.rank, range(3))
    save(ranks.folder, model, hook, optimizer, own)
    run(model, optimizer, ranks.rank, range(3, 6))
    resumed = build(ranks, ranks.spec)
    load(ranks.folder, *resumed, own)
    run(resumed[0], resumed[2], ranks.rank, range(3, 6))
    assert same(weights(resumed[0]), weights(model))
    assert resumed[1].steps == hook.steps == 6


POWER_SGD = "powersgd:rank=1,min_compression=0.5"
HSDP = ("int4:feedback=true,exempt=none", POWER_SGD, f"{POWER_SGD},sides=one")


@on_ranks(4, specs=HSDP)
def test_resuming_hsdp_on_the_same_mesh_is_exact(ranks: Ranks) -> None:
    """Also with shards that are not even, and with a parameter that has had no gradient yet."""

    def build_uneven() -> tuple[Any, Any, Any]:
        module = seeded(models.Deep, 3, 17)
        module.unused = seeded(models.Deep, 1, 17)
        hook = gradwire.hsdp(module, mesh_2d(ranks, 2), units=module.layers, replicas=ranks.spec)
        ranks.hooks.append(hook)
        return module, hook, torch.optim.AdamW(module.layers.parameters(), lr=0.01)

    def run_uneven(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(models.batch(ranks.rank, step, 17)).square().mean().backward()
            optimizer.step()

    own = f"rank{ranks.rank}"
    model, hook, optimizer = build_uneven()
    run_uneven(model, optimizer, range(3))
    save(ranks.folder, model, hook, optimizer, own)
    again, other, optim = build_uneven()
    load(ranks.folder, again, other, optim, own)
    for each, opt in ((model, optimizer), (again, optim)):
        run_uneven(each, opt, range(3, 5))
    assert same(weights(again), weights(model))
    one, two = (each.state_dict()["replicas"]["memory"] for each in (hook, other))
    assert bool(one) == ("powersgd" in ranks.spec)
    assert all(same(one[name], two[name]) for name in one)


@on_ranks(4)
def test_a_merged_state_keeps_the_sums_on_another_mesh(ranks: Ranks) -> None:
    model, hook, optimizer = build_hsdp(ranks, 2)
    run(model, optimizer, ranks.rank, range(2))
    merged = hook.state_dict(merged=True)
    everyone: list[Any] = [None] * 4
    torch.distributed.all_gather_object(everyone, hook.state_dict(), group=ranks.group)
    for replicas in (1, 4, 2):
        for state in (merged, everyone):
            _, other, _ = build_hsdp(ranks, replicas)
            other.load_state_dict(state)
            assert other.steps == 2
            again = other.state_dict(merged=True)
            for name, total in merged["residuals"].items():
                assert torch.allclose(again["residuals"][name], total, atol=1e-6), (replicas, name)
            for name, total in merged["replicas"]["residuals"].items():
                assert torch.allclose(again["replicas"]["residuals"][name], total, atol=1e-6), (replicas, name)


@on_ranks(2, 4)
def test_a_checkpoint_loads_on_half_as_many_ranks(ranks: Ranks) -> None:
    model, hook, optimizer = build(ranks, "int4:feedback=true,exempt=none")
    run(model, optimizer, ranks.rank, range(2))
    save(ranks.folder, model, hook, optimizer, "all", merged=True)
    half = ranks.new_group(range(ranks.size // 2))
    if ranks.rank < ranks.size // 2:
        smaller = shard(seeded(models.Deep), mesh_of(ranks, half))
        other = ranks.register(smaller, "int4:feedback=true,exempt=none", gather="int8")
        optim = torch.optim.AdamW(smaller.parameters(), lr=0.01)
        state, opt = get_state_dict(smaller, optim)
        saved = {"model": state, "optim": opt, "gradwire": {"all": other.state_dict(merged=True)}}
        dcp.load(saved, checkpoint_id=ranks.folder, process_group=half)
        other.load_state_dict(saved["gradwire"]["all"])
        assert other.steps == 2
        now = other.state_dict(merged=True)["residuals"]
        assert any(value.any() for value in now.values())
        for name, value in saved["gradwire"]["all"]["residuals"].items():
            assert torch.allclose(now[name], value, atol=1e-6)


@on_ranks(2)
def test_a_model_and_its_optimizer_are_saved_exactly_whatever_is_gathered(ranks: Ranks) -> None:
    model, _, optimizer = build(ranks, "int8", "int4:exempt=none")
    run(model, optimizer, ranks.rank, range(2))
    state, _ = get_state_dict(model, optimizer)
    assert same({name: value.full_tensor() for name, value in state.items()}, weights(model))


@on_ranks(2)
def test_states_of_another_model_are_refused(ranks: Ranks) -> None:
    _, hook, _ = build(ranks, SPECS[0])
    state = hook.state_dict()
    wrong = {**state, "residuals": {"other": torch.zeros(3)}}
    assert "another model" in raised(StateError, lambda: hook.load_state_dict(sealed(wrong)))
    assert "missing" in raised(StateError, lambda: hook.load_state_dict({"step": 1}))
    assert "load each rank's own state" in raised(
        StateError, lambda: hook.load_state_dict(sealed({**state, "size": 3}))
    )
