"""Hooks with `whiten=true` on models: training, switching, checkpoints, AMP, steps in backward, FSDP2, errors."""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.exchanges.whiten import WARMUP
from gradwire.optim import step_in_backward

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import mesh_2d, shard
from ..kit.trial import raised
from ..kit.versions import sharded_models

SPEC = "int2:whiten=true,exempt=none"


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Two groups with settings of their own."""
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 1e-2, "betas": (0.8, 0.9)}])


def train(model: DDP, optimizer: torch.optim.Optimizer, rank: int, begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def values(model: torch.nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def same_on_all(ranks: Ranks, tensor: Tensor) -> bool:
    rows = [torch.empty_like(tensor) for _ in range(ranks.size)]
    dist.all_gather(rows, tensor, group=ranks.group)
    return all(torch.equal(row, rows[0]) for row in rows)


@on_ranks(2, 4)
def test_training_keeps_replicas_identical_and_resumes_with_the_same_bits(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep))
    optimizer = adamw(model)
    hook = ranks.register(model, SPEC, optimizer=optimizer, chunk_bytes=1024)
    train(model, optimizer, ranks.rank, 0, WARMUP + 3)
    assert same_on_all(ranks, values(model))
    hook.verify()
    file = io.BytesIO()
    torch.save([model.module.state_dict(), optimizer.state_dict(), hook.state_dict()], file)
    train(model, optimizer, ranks.rank, WARMUP + 3, WARMUP + 6)

    file.seek(0)
    again = ranks.wrap(seeded(models.Deep))
    other = adamw(again)
    resumed = ranks.register(again, SPEC, optimizer=other, chunk_bytes=1024)
    train(again, other, ranks.rank, 0, 2)  # DDP cuts its buckets anew after the first step
    for target, state in zip((again.module, other, resumed), torch.load(file), strict=True):
        target.load_state_dict(state)
    train(again, other, ranks.rank, WARMUP + 3, WARMUP + 6)
    assert torch.equal(values(model), values(again))

    plain = ranks.wrap(seeded(models.Deep))
    third = adamw(plain)
    ranks.register(plain, "int2:exempt=none", chunk_bytes=1024)
    train(plain, third, ranks.rank, 0, WARMUP + 6)
    assert not torch.equal(values(model), values(plain))


@on_ranks(2)
def test_switching_and_steps_in_backward_give_the_same_bits(ranks: Ranks) -> None:
    """The second model is stepped while its backward pass runs, and switches to the hook after the warm-up."""
    one = ranks.wrap(seeded(models.Deep))
    two = ranks.wrap(copy.deepcopy(one.module))
    first, second = adamw(one), adamw(two)
    ranks.register(one, SPEC, optimizer=first, bucket_mb=0.001)
    hook = ranks.register(two, "exact", optimizer=second, bucket_mb=0.001)
    step_in_backward(two, second)
    train(one, first, ranks.rank, 0, WARMUP)
    train(two, second, ranks.rank, 0, WARMUP)
    hook.switch(SPEC)
    train(one, first, ranks.rank, WARMUP, WARMUP + 4)
    train(two, second, ranks.rank, WARMUP, WARMUP + 4)
    assert torch.equal(values(one), values(two))


@on_ranks(2)
def test_a_loss_scale_changes_nothing_and_an_inf_skips_the_step_everywhere(ranks: Ranks) -> None:
    """Scaled gradients meet a second moment of unscaled ones: a power of two only moves the exponents of the scales."""
    outcomes = []
    for scale in (1.0, 1024.0):
        model = ranks.wrap(seeded(models.Deep))
        optimizer = adamw(model)
        ranks.register(model, SPEC, optimizer=optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        for step in range(WARMUP + 4):
            optimizer.zero_grad()
            loss = model(batch(ranks.rank, step)).square().mean()
            if step == WARMUP + 2:
                before, loss = values(model), loss * (torch.inf if ranks.rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == WARMUP + 2:
                assert torch.equal(before, values(model))
        assert same_on_all(ranks, values(model))
        outcomes.append(values(model))
    torch.testing.assert_close(*outcomes, rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_what_cannot_be_done_is_refused_on_registration(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep))
    text = raised(gradwire.RegisterError, lambda: ranks.register(model, SPEC))
    assert "optimizer=optimizer" in text
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "SGD keeps none" in raised(gradwire.RegisterError, lambda: ranks.register(model, SPEC, optimizer=sgd))
    hook = ranks.register(model, "int8", optimizer=sgd)  # as `watch` may need it
    assert "optimizer=optimizer" in raised(gradwire.RegisterError, lambda: hook.switch(SPEC))


@on_ranks(2)
def test_ranks_whose_optimizer_states_differ_are_refused(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep))
    optimizer = adamw(model)
    ranks.register(model, "exact")
    train(model, optimizer, ranks.rank, 0, 2)
    if ranks.rank == 1:
        next(iter(optimizer.state.values()))["exp_avg_sq"].mul_(2)
    other = ranks.wrap(model.module)
    text = raised(gradwire.RegisterError, lambda: ranks.register(other, SPEC, optimizer=optimizer))
    assert "same optimizer state" in text


@on_ranks(4)
def test_replicas_of_a_sharded_model(ranks: Ranks) -> None:
    mesh, module = mesh_2d(ranks, 2), seeded(models.Deep)
    model = shard(module, mesh["shard"])
    optimizer = adamw(model)
    hook = ranks.register(model, "exact", replicas=SPEC, mesh=mesh, optimizer=optimizer)
    train(model, optimizer, ranks.rank, 0, WARMUP + 3)
    local = torch.cat([param.to_local().detach().flatten() for param in model.parameters()])
    rows = [torch.empty_like(local) for _ in range(ranks.size)]
    dist.all_gather(rows, local, group=ranks.group)
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[3])
    hook.verify()
    text = raised(gradwire.SpecError, lambda: hook.switch(SPEC))
    assert "no option whiten" in text


test_replicas_of_a_sharded_model = sharded_models(test_replicas_of_a_sharded_model)
