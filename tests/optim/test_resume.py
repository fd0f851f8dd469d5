"""Exact resume: whatever keeps state goes on with the same bits, from any step and through any kind of checkpoint.

Each subject trains for `STEPS` steps and is saved after a random one of them: in a warm-up, within a round, with an
average under way. It is saved in a file, by `torch.distributed.checkpoint`, and by the latter in the background while
training continues. New objects that load one of these come to the same parameters.
"""

from __future__ import annotations

import dataclasses
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradwire
from gradwire.optim import DiLoCo, LocalSGD, OneBitAdamW, PeriodicModelAverager, PostLocalSGDOptimizer, step_in_backward

from ..kit import sharded
from ..kit.models import Deep, batch, seeded
from ..kit.ranks import Ranks, on_ranks

STEPS = 8


@dataclasses.dataclass
class Run:
    """One training: what it consists of, and what keeps state besides the model and its optimizer."""

    model: nn.Module
    optimizer: Any
    kept: Any = None
    enter: Callable[[], object] = lambda: None

    def train(self, rank: int, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(batch(rank, step)).square().mean().backward()
            self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [sharded.whole(param) for param in self.model.parameters()]

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds, in the order in which it is loaded."""
        parts = {"model": getattr(self.model, "module", self.model), "optimizer": self.optimizer, "kept": self.kept}
        return {name: part for name, part in parts.items() if part is not None}

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(state[name])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def ddp(spec: str, inside: bool = False) -> Callable[[Ranks], Run]:
    def make(ranks: Ranks) -> Run:
        model = ranks.wrap(seeded(Deep))
        optimizer = adamw(model)
        options = {"optimizer": optimizer} if "whiten" in spec else {}
        hook = ranks.register(model, spec, **options)
        if inside:
            step_in_backward(model, optimizer)
        return Run(model, optimizer, hook)

    return make


def local(kind: type[LocalSGD], **options: Any) -> Callable[[Ranks], Run]:
    def make(ranks: Ranks) -> Run:
        model = seeded(Deep)
        optimizer = adamw(model)
        rounds = kind(model, optimizer, process_group=ranks.group, **options)
        ranks.hooks.append(rounds.hook)
        return Run(model, optimizer, rounds, rounds.__enter__)

    return make


def one_bit(ranks: Ranks) -> Run:
    model = seeded(Deep)
    optimizer = OneBitAdamW(model.parameters(), lr=0.01, warmup=3, refresh=2, process_group=ranks.group)
    ranks.hooks.append(optimizer)  # type: ignore[arg-type]  # what has a close()
    return Run(model, optimizer)


def averaged(ranks: Ranks) -> Run:
    model = seeded(Deep)
    averager = PeriodicModelAverager(3, 1, ranks.group, exchange="int4:exempt=none,feedback=true")
    ranks.hooks.append(averager)  # type: ignore[arg-type]
    return Run(model, PostLocalSGDOptimizer(adamw(model), averager))


def hsdp(ranks: Ranks) -> Run:
    """Batched PowerSGD keeps state whose shapes a new hook does not know."""
    module = seeded(Deep)
    hook = gradwire.hsdp(
        module, sharded.mesh_2d(ranks, 2), units=module.layers, replicas="powersgd:rank=1,batched=true"
    )
    ranks.hooks.append(hook)
    return Run(module, adamw(module), hook)


MAKERS: dict[str, Callable[[Ranks], Run]] = {
    "int4": ddp("int4:feedback=true,exempt=none"),
    "int8, stochastic": ddp("int8:rounding=stochastic"),
    "topk": ddp("topk:exempt=none"),
    "two levels": ddp("two_level:inside=exact,across=int4(exempt=none, feedback=true),node=1"),
    "int3, allocated": ddp("int3:allocate=true,exempt=none"),
    "int4, whitened": ddp("int4:whiten=true,exempt=none,feedback=true"),
    "powersgd": ddp("powersgd:rank=1,min_compression=0.5,warmup=4"),
    "powersgd, batched": ddp("powersgd:rank=1,batched=true"),
    "sign, in backward": ddp("sign:feedback=true,exempt=none", inside=True),
    "local sgd": local(LocalSGD, sync_every=3, exchange="int4:feedback=true,exempt=none"),
    "diloco": local(DiLoCo, sync_every=4, fragments=2, delay=2, exchange="int4:feedback=true,exempt=none"),
    "one-bit adamw": one_bit,
    "averager": averaged,
}


# -- the ways to save ------------------------------------------------------------------------------------------------


def as_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(octets: bytes) -> Any:
    return torch.load(io.BytesIO(octets), weights_only=True)


def through_a_file(run: Run, ranks: Ranks, folder: Path) -> Callable[[], Any]:
    path = folder / f"{ranks.rank}.pt"
    torch.save(run.state(), path)
    return lambda: torch.load(path, weights_only=True)


def through_dcp(run: Run, ranks: Ranks, folder: Path) -> Callable[[], Any]:
    """As docs/trust.md says: torch stores bytes of any length under the rank's own key, as it does numbers."""
    key = f"rank{ranks.rank}"
    dcp.save({key: as_bytes(run.state())}, checkpoint_id=folder, process_group=ranks.group)
    return lambda: _load(key, ranks, folder)


def through_dcp_in_the_background(run: Run, ranks: Ranks, folder: Path) -> Callable[[], Any]:
    key, own = f"rank{ranks.rank}", ranks.new_group(range(ranks.size))
    saving = dcp.async_save({key: as_bytes(run.state())}, checkpoint_id=folder, process_group=own)

    def load() -> Any:
        saving.result()  # type: ignore[union-attr]
        return _load(key, ranks, folder)

    return load


def _load(key: str, ranks: Ranks, folder: Path) -> Any:
    state = {key: b""}
    dcp.load(state, checkpoint_id=folder, process_group=ranks.group)
    return from_bytes(state[key])


BY_BUCKET = ("int8, stochastic", "powersgd, batched")
"""What depends on the order of the gradients in a bucket, which DDP changes after its first backward pass."""


def check_resume(ranks: Ranks, *ways: Callable[..., Callable[[], Any]]) -> None:
    make, at = MAKERS[ranks.spec], random.Random(ranks.spec).randrange(1, STEPS)
    first, loads = make(ranks), []
    first.enter()
    first.train(ranks.rank, range(at))
    for way in ways:
        folder = ranks.folder / way.__name__
        folder.mkdir(exist_ok=True)
        loads.append(way(first, ranks, folder))
    first.train(ranks.rank, range(at, STEPS))
    for way, load in zip(ways, loads, strict=True):
        again = make(ranks)
        if ranks.spec in BY_BUCKET:
            again.model(batch(ranks.rank, 0)).sum().backward()
        again.load(load())
        again.enter()
        again.train(ranks.rank, range(at, STEPS))
        assert all(map(torch.equal, again.values(), first.values())), f"{way.__name__}, saved after step {at}"


@on_ranks(2, specs=tuple(MAKERS))
def test_resuming_from_a_random_step_is_exact(ranks: Ranks) -> None:
    check_resume(ranks, through_a_file)


@on_ranks(2, specs=("diloco",))
def test_resuming_through_dcp_is_exact(ranks: Ranks) -> None:
    check_resume(ranks, through_dcp, through_dcp_in_the_background)


@pytest.mark.thorough
@on_ranks(2, specs=tuple(MAKERS))
def test_everything_resumes_exactly_through_dcp(ranks: Ranks) -> None:
    check_resume(ranks, through_dcp, through_dcp_in_the_background)


@on_ranks(4)
def test_batched_powersgd_of_replicas_resumes_exactly_through_dcp(ranks: Ranks) -> None:
    key, first = f"rank{ranks.rank}", hsdp(ranks)
    first.train(ranks.rank, range(3))
    model, optimizer = get_state_dict(first.model, first.optimizer)
    state = {"model": model, "optimizer": optimizer, "gradwire": {key: as_bytes(first.kept.state_dict())}}
    dcp.save(state, checkpoint_id=ranks.folder)
    first.train(ranks.rank, range(3, 6))
    again = hsdp(ranks)
    model, optimizer = get_state_dict(again.model, again.optimizer)
    state = {"model": model, "optimizer": optimizer, "gradwire": {key: b""}}
    dcp.load(state, checkpoint_id=ranks.folder)
    set_state_dict(again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    again.kept.load_state_dict(from_bytes(state["gradwire"][key]))
    assert again.kept.state_dict()["replicas"]["memory"]
    again.train(ranks.rank, range(3, 6))
    assert all(map(torch.equal, again.values(), first.values()))


# -- another number of ranks -----------------------------------------------------------------------------------------


@on_ranks(4)
def test_the_sum_of_residuals_goes_from_4_ranks_to_2_to_3(ranks: Ranks) -> None:
    """In a trial of `auto` as well, whose candidates leave residuals behind."""
    for spec, options in ((SIGN, {}), ("auto", {"hooks": TRIED, "trusted": TRIED})):
        state: list[Any] = [None]
        for size in (4, 2, 3):
            group = ranks.new_group(range(size))
            if ranks.rank < size:
                hook, model = resumed(ranks, group, spec, options, state[0])
                for step in range(120):  # `auto` waits for the trial of the hook before for up to 60 steps
                    model(batch(ranks.rank, step)).square().mean().backward()
                    if step >= 2 and hook.exchange.takes_residual:  # in its turn, in a trial of `auto`
                        break
                state = [hook.state_dict(merged=True)]
            dist.broadcast_object_list(state, src=0, group=ranks.group)
            assert any(value.any() for value in state[0]["residuals"].values())


SIGN = "sign:feedback=true,exempt=none"
TRIED = (SIGN, "topk:exempt=none")


def resumed(
    ranks: Ranks, group: dist.ProcessGroup, spec: str, options: dict[str, Any], state: dict[str, Any] | None
) -> tuple[gradwire.Hook, nn.Module]:
    """A new hook that goes on from a state. Nothing of its residuals is lost."""
    model = ranks.wrap(seeded(Deep), process_group=group)
    hook = ranks.register(model, spec, **options)
    if state is not None:
        hook.load_state_dict(from_bytes(as_bytes(state)))
        assert hook.steps == state["step"]
        for name, total in hook.state_dict(merged=True)["residuals"].items():
            torch.testing.assert_close(total, state["residuals"][name])
    return hook, model
