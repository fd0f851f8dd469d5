"""Checkpoints of a hook, through torch.save and torch.load with its defaults."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import Hook, StateError
from gradwire.engine.fingerprint import sealed

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import FEEDBACK, SPECS, Ranks, on_ranks
from ..kit.trial import Trial, assert_near, raised, residuals, through_a_file, train


def trained(ranks: Ranks, count: int = 3, module: torch.nn.Module | None = None, **options: Any) -> Trial:
    """find_unused_parameters keeps DDP from cutting its buckets anew: a new DDP starts with the same ones."""
    options = {"bucket_cap_mb": 0.002, "find_unused_parameters": True, **options}
    trial = Trial(ranks, module or seeded(models.Deep, 6), **options)
    return go_on(ranks, trial, 0, count)


def go_on(ranks: Ranks, trial: Trial, first: int, count: int) -> Trial:
    for step in range(first, first + count):
        trial.backward(batch(trial.group.rank(), step))
        trial.optimizer.step()
    return trial


@on_ranks(1, 2, thorough=(3,), specs=SPECS)
def test_resuming_is_bit_exact(ranks: Ranks) -> None:
    first = trained(ranks)
    saved = through_a_file({"hook": first.hook.state_dict(), "model": first.model.module.state_dict()})
    go_on(ranks, first, 3, 3)

    second = trained(ranks, 0)
    second.model.module.load_state_dict(saved["model"])
    second.hook.load_state_dict(saved["hook"])
    assert second.hook.steps == 3
    go_on(ranks, second, 3, 3)
    for mine, theirs in zip(second.params, first.params, strict=True):
        assert torch.equal(mine, theirs), "the resumed run went another way"


@on_ranks(2, specs=FEEDBACK)
def test_resuming_without_the_state_is_not_exact(ranks: Ranks) -> None:
    """The check above can fail: what the residuals hold does matter."""
    first = trained(ranks)
    saved = copy.deepcopy(first.model.module.state_dict())
    go_on(ranks, first, 3, 3)
    second = trained(ranks, 0)
    second.model.module.load_state_dict(saved)
    go_on(ranks, second, 3, 3)
    assert not all(torch.equal(a, b) for a, b in zip(first.params, second.params, strict=True))


@on_ranks(2, thorough=(3,), specs=FEEDBACK)
def test_resuming_with_other_buckets(ranks: Ranks) -> None:
    """State belongs to parameters: the buckets of the new run may be cut in any way."""
    state = through_a_file(trained(ranks).hook.state_dict())
    other = trained(ranks, 0, bucket_cap_mb=25, find_unused_parameters=False)
    other.hook.load_state_dict(state)
    kept = residuals(other.hook)
    assert kept.keys() == state["residuals"].keys()
    for name, value in kept.items():
        assert torch.equal(value, state["residuals"][name])
    _check_conserved(ranks, other, state["residuals"], 3)


@on_ranks(4, specs=FEEDBACK)
def test_merged_state_on_fewer_ranks(ranks: Ranks) -> None:
    """Four ranks save to one file; two of them, and then three, go on from it."""
    trial = trained(ranks)
    merged = trial.hook.state_dict(merged=True)
    for name, value in residuals(trial.hook).items():
        torch.testing.assert_close(merged["residuals"][name], ranks.sum_(value.clone()))
    path = ranks.folder / f"merged-{ranks.spec.replace(':', '-')}.pt"
    if ranks.rank == 0:
        torch.save(merged, path)
    dist.barrier(ranks.group)
    for size in (2, 3):
        group = ranks.new_group(range(size))
        if ranks.rank < size:
            _check_sum(ranks, torch.load(path, weights_only=True), merged["residuals"], group)


@on_ranks(4, specs=FEEDBACK)
def test_list_of_states_on_fewer_ranks(ranks: Ranks) -> None:
    trial = trained(ranks)
    states: list[Any] = [None] * ranks.size
    dist.all_gather_object(states, trial.hook.state_dict(), group=ranks.group)
    total = trial.hook.state_dict(merged=True)["residuals"]
    group = ranks.new_group((0, 1, 3))
    if ranks.rank != 2:
        _check_sum(ranks, states, total, group)


@on_ranks(4, specs=FEEDBACK)
def test_merged_state_on_more_ranks(ranks: Ranks) -> None:
    pair = ranks.new_group((0, 1))
    states: list[Any] = [None]
    if ranks.rank < 2:
        states = [trained(ranks, group=pair).hook.state_dict(merged=True)]
    dist.broadcast_object_list(states, src=0, group=ranks.group)
    _check_sum(ranks, states[0], states[0]["residuals"], ranks.group)


def _check_sum(ranks: Ranks, state: Any, total: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Loaded on `group`, the residuals still sum up to the same, and the next step still loses nothing."""
    trial = trained(ranks, 0, group=group)
    trial.hook.load_state_dict(state)
    assert trial.hook.steps == 3
    kept = residuals(trial.hook)
    assert kept.keys() == total.keys()
    for name, value in kept.items():
        limit = 1e-7 + 1e-6 * float(total[name].abs().max())
        torch.testing.assert_close(ranks.sum_(value.clone(), group), total[name], rtol=1e-5, atol=limit)
    _check_conserved(ranks, trial, kept, 3)


def _check_conserved(ranks: Ranks, trial: Trial, pending: Mapping[str, Tensor], step: int) -> None:
    """The next mean plus the new residuals equals the mean of the gradients and the residuals before."""
    group = trial.group
    local = trial.local(batch(group.rank(), step))
    trial.backward(batch(group.rank(), step))
    after, names = residuals(trial.hook), [name for name, _ in trial.model.module.named_parameters()]
    came = torch.cat([grad.double().reshape(-1) + pending[name] for name, grad in zip(names, local, strict=True)])
    kept = torch.cat([after[name].double() for name in names])
    got = torch.cat([param.grad.double().reshape(-1) for param in trial.params])
    mean, kept = (ranks.sum_(value, group) / group.size() for value in (came, kept))
    assert_near(got + kept, mean, 1e-6 * float(mean.norm()), "mean plus residuals")


def refuses(hook: Hook, state: Any) -> str:
    """The text of the refusal; the hook is as it was."""
    before, steps = residuals(hook), hook.steps
    text = raised(StateError, lambda: hook.load_state_dict(state))
    after = residuals(hook)
    assert hook.steps == steps
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return text


@on_ranks(2, specs=FEEDBACK)
def test_state_of_another_rank_is_refused(ranks: Ranks) -> None:
    trial = trained(ranks)
    states: list[Any] = [None] * ranks.size
    dist.all_gather_object(states, trial.hook.state_dict(), group=ranks.group)
    if ranks.rank == 0:
        trial.hook.load_state_dict(states[0])
    else:
        text = refuses(trial.hook, states[0])
        assert f"rank 0 of {ranks.size}" in text
        assert "merged=True" in text
    go_on(ranks, trial, 3, 2)
    assert trial.hook.verify().steps == 5


@on_ranks(2, specs=FEEDBACK)
def test_incomplete_list_of_states_is_refused(ranks: Ranks) -> None:
    trial = trained(ranks)
    states: list[Any] = [None] * ranks.size
    dist.all_gather_object(states, trial.hook.state_dict(), group=ranks.group)
    others = [state for state in states if state["rank"] != ranks.rank]
    refuses(trial.hook, others)


@on_ranks(2, specs=FEEDBACK)
def test_state_of_another_model_is_refused(ranks: Ranks) -> None:
    trial = trained(ranks)
    fewer = trained(ranks, module=seeded(models.Deep, 4, 8), count=0)
    for step in range(2):
        fewer.backward(batch(ranks.rank, step, 8))
    assert "another model" in refuses(trial.hook, fewer.hook.state_dict())
    more = trained(ranks, module=seeded(models.Deep, 8))
    assert "layers.7.weight" in refuses(trial.hook, more.hook.state_dict())
    go_on(ranks, trial, 3, 2)
    assert trial.hook.verify().steps == 5


@on_ranks(1, 2, specs=("exact", "fp16:feedback=true"))
def test_invalid_states_are_refused(ranks: Ranks) -> None:
    hook = trained(ranks).hook
    good = hook.state_dict()
    cases: list[Any] = [{}, [], {**good, "version": 99}, {"residuals": {}}, [good, {}]]
    for state in cases:
        assert "state" in refuses(hook, state)


@on_ranks(2)
def test_a_layer_that_was_frozen_since_keeps_its_residual(ranks: Ranks) -> None:
    trial = trained(ranks, register={"spec": "sign:feedback=true,exempt=none"})
    saved = trial.hook.state_dict()
    module = copy.deepcopy(trial.model.module)
    first = next(module.parameters())
    first.requires_grad_(False)
    frozen = next(name for name, param in module.named_parameters() if param is first)
    hook = ranks.register(ranks.wrap(module), "sign:feedback=true,exempt=none")
    hook.load_state_dict(saved)
    assert torch.equal(hook.state_dict()["residuals"][frozen], saved["residuals"][frozen])


@on_ranks(2)
def test_a_state_fits_the_compiled_module_too(ranks: Ranks) -> None:
    trial = trained(ranks, register={"spec": "sign:feedback=true,exempt=none"})
    saved = trial.hook.state_dict()
    module = torch.compile(copy.deepcopy(trial.model.module), backend="eager")
    hook = ranks.register(ranks.wrap(module), "sign:feedback=true,exempt=none")
    hook.load_state_dict(saved)
    loaded = hook.state_dict()["residuals"]
    assert loaded.keys() == saved["residuals"].keys()
    assert all(torch.equal(loaded[name], saved["residuals"][name]) for name in loaded)


@on_ranks(2)
def test_merging_residuals_that_one_rank_alone_keeps(ranks: Ranks) -> None:
    trial = trained(ranks, register={"spec": "sign:feedback=true,exempt=none"})
    state = trial.hook.state_dict()
    if ranks.rank == 1:
        state["residuals"] = {}
    trial.hook.load_state_dict(sealed(state))
    merged = trial.hook.state_dict(merged=True)["residuals"]
    own = trial.hook.state_dict()["residuals"] if ranks.rank == 0 else merged
    assert merged.keys() == own.keys() != set()
    assert all(torch.equal(merged[name], own[name]) for name in own)


@on_ranks(2)
def test_inf_in_a_state_is_refused_and_heals_at_run_time(ranks: Ranks) -> None:
    trial = trained(ranks, register={"spec": "sign:feedback=true,exempt=none"})
    state = trial.hook.state_dict()
    name, kept = next(iter(state["residuals"].items()))
    broken = {**state, "residuals": {**state["residuals"], name: torch.full_like(kept, float("nan"))}}
    assert f"inf or NaN in the residuals of {name}" in refuses(trial.hook, sealed(broken))
    assert "step is a whole number" in refuses(trial.hook, {**state, "step": True})
    trial.hook.scale_state(3e38)  # overflows
    assert all(torch.isfinite(value).all() for value in residuals(trial.hook).values())
    trial.hook._residuals.by_param[name].fill_(float("inf"))
    train(trial.model, [batch(ranks.rank, 3), batch(ranks.rank, 4)])
    assert all(torch.isfinite(param.grad).all() for param in trial.params)
