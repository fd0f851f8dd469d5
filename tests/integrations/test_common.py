"""What the integrations share. None of it needs a framework."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.engine import checkpoint
from gradwire.errors import RegisterError, SpecError
from gradwire.integrations import accelerate, common, lightning, transformers

from ..kit.models import Deep, batch, seeded
from ..kit.ranks import Ranks, on_ranks

SPEC = "int4:feedback=true,exempt=none"


def trained(ranks: Ranks) -> gradwire.Hook:
    model = ranks.wrap(seeded(Deep))
    hook = ranks.register(model, SPEC)
    model(batch(ranks.rank, 0)).square().mean().backward()
    return hook


@on_ranks(2)
def test_metrics_are_those_of_stats(ranks: Ranks) -> None:
    hook = trained(ranks)
    stats, found = hook.stats(), common.metrics(hook)
    assert found["gradwire/sent_bytes"] == stats.sent_bytes > 0
    assert found["gradwire/wait_s"] == stats.wait_s
    assert all(isinstance(value, float) for value in found.values())
    assert {name.removeprefix("gradwire/") for name in found} <= set(gradwire.metrics.METRICS)


def test_metrics_take_a_hook() -> None:
    with pytest.raises(SpecError, match=r"metrics takes the hook that gradwire\.register has returned, got str"):
        gradwire.integrations.metrics("int8")  # type: ignore[arg-type]


@on_ranks(2)
def test_a_folder_keeps_the_state_of_each_rank(ranks: Ranks) -> None:
    hook = trained(ranks)
    common.save(hook, ranks.folder / "new")
    again = trained(ranks)
    common.load(again, ranks.folder / "new")
    kept, loaded = hook.state_dict()["residuals"], again.state_dict()["residuals"]
    assert kept.keys() == loaded.keys()
    assert all(torch.equal(kept[name], loaded[name]) for name in kept)
    states = common.gathered(hook)
    assert [state["rank"] for state in states] == ([0, 1] if ranks.rank == 0 else [])


@on_ranks(2)
def test_states_of_more_ranks_are_summed(ranks: Ranks) -> None:
    hook = trained(ranks)
    if ranks.rank == 0:
        for rank in range(4):  # what four ranks would have written
            state = checkpoint.pack(SPEC, 1, rank, 4, {"layers.0.bias": torch.full((16,), 1.0)})
            torch.save(state, ranks.folder / f"gradwire_{rank}.pt")
    dist.barrier()
    common.load(hook, ranks.folder)
    assert torch.equal(hook.state_dict()["residuals"]["layers.0.bias"], torch.full((16,), 2.0))


@on_ranks(2)
def test_a_folder_that_only_some_ranks_see_is_refused(ranks: Ranks) -> None:
    hook = trained(ranks)
    common.save(hook, ranks.folder / str(ranks.rank))
    with pytest.raises(RegisterError, match="same checkpoint, got rank 0 'with state"):
        common.load(hook, ranks.folder / "0" if ranks.rank == 0 else ranks.folder / "none")
    before = hook.state_dict()["residuals"]
    common.load(hook, ranks.folder / "none")
    assert all(torch.equal(value, before[name]) for name, value in hook.state_dict()["residuals"].items())


@on_ranks(2)
def test_models_that_cannot_carry_a_hook_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RegisterError, match=r"It has made a Linear, and gradwire needs .* \(FSDP2\): choose"):
        common.attach("It", nn.Linear(2, 2), "int8", (), {})


def test_one_process_is_refused() -> None:
    with pytest.raises(RegisterError, match=r"It runs one process, .* start several, as in `torchrun"):
        common.attach("It", nn.Linear(2, 2), "int8", (), {})


@pytest.mark.parametrize("make", [lightning.Gradwire, transformers.Gradwire, accelerate.prepare])
def test_a_framework_that_is_missing_or_too_old(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"hook": "int8"} if make is accelerate.prepare else {}

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match=r"is not installed: pip install '[a-z]+>="):
        make("int8", **options)
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.post1")
    with pytest.raises(ImportError, match=r"or newer, and 0\.10\.post1 is installed; pip install -U"):
        make("int8", **options)
    monkeypatch.setattr(metadata, "version", lambda name: "99.0.0rc1")
    common.require("2.4", "lightning")
