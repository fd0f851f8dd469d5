"""Who takes part: ranks that run out of inputs, models on a part of the ranks, several models at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import MAIN, Ranks, on_ranks
from ..kit.trial import Trial, assert_near, loss, same_everywhere, vector


def uneven(ranks: Ranks, *, divide_by_initial_world_size: bool, **ddp: bool) -> None:
    """Rank r has r + 1 inputs. A rank gets the sum over the live ranks, divided by all ranks or by the live ones."""
    module = seeded(models.Deep, 6)
    twin = copy.deepcopy(module)
    model = ranks.wrap(module, bucket_cap_mb=0.002, **ddp)
    hook = ranks.register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    with Join([model], divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(ranks.rank + 1):
            optimizer.zero_grad()
            loss(model(batch(ranks.rank, step))).backward()
            live = range(step, ranks.size)
            divisor = ranks.size if divide_by_initial_world_size else len(live)
            local = [_local(model, twin, batch(rank, step)) for rank in live]
            found.append((_gradient(model), local, divisor))
            optimizer.step()
    for step, (got, local, divisor) in enumerate(found):  # after Join, where an error would leave the others waiting
        _compare_sum(ranks, got, local, divisor, step)
    same_everywhere(model.parameters(), ranks.group)
    assert hook.steps == ranks.size, "joined ranks take part in every step"


def _compare_sum(ranks: Ranks, got: torch.Tensor, local: Sequence[torch.Tensor], divisor: int, step: int) -> None:
    if not ranks.exchange.lanes:
        assert torch.equal(got, local[ranks.rank - step])
        return
    norm = math.sqrt(sum(float(one.square().sum()) for one in local) / ranks.size) * ranks.size / divisor
    factor = 4 if ranks.exchange.takes_residual else 1.01
    allowed = factor * (ranks.exchange.bound(ranks.size) + ranks.size * 2.0**-23) * norm
    assert_near(got, sum(local) / divisor, allowed, f"step {step}")


def _local(model: DDP, twin: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    twin.load_state_dict(model.module.state_dict())
    twin.zero_grad()
    loss(twin(rows)).backward()
    return _gradient(twin)


def _gradient(module: torch.nn.Module) -> torch.Tensor:
    params = list(module.parameters())
    return vector(params, [param.grad for param in params], torch.float32)


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_uneven_inputs(ranks: Ranks) -> None:
    uneven(ranks, divide_by_initial_world_size=True)


@on_ranks(2, 4, thorough=(3,), specs=MAIN)
def test_uneven_inputs_divided_by_live_ranks(ranks: Ranks) -> None:
    uneven(ranks, divide_by_initial_world_size=False)


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_uneven_inputs_and_unused_parameters(ranks: Ranks) -> None:
    uneven(ranks, divide_by_initial_world_size=False, find_unused_parameters=True)


@on_ranks(2, thorough=(3,), specs=("exact",))
def test_uneven_inputs_like_plain_ddp(ranks: Ranks) -> None:
    """One input on rank 0, two on the others; gradients are the rank's number + 1."""
    for initial in (True, False):
        gradients = []
        for hooked in (False, True):
            model = ranks.wrap(torch.nn.Linear(1, 1, bias=False))
            if hooked:
                ranks.register(model)
            with Join([model], divide_by_initial_world_size=initial):
                for _ in range(1 + min(ranks.rank, 1)):
                    model.zero_grad()
                    model(torch.full((1, 1), ranks.rank + 1.0)).sum().backward()
            gradients.append(float(model.module.weight.grad))
        assert gradients[0] == gradients[1], (
            f"plain DDP {gradients[0]}, hooked {gradients[1]} (divide_by_initial_world_size={initial})"
        )


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_training_goes_on_after_uneven_inputs(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 3))
    with Join([trial.model], divide_by_initial_world_size=False):
        for step in range(ranks.rank + 1):
            trial.backward(batch(ranks.rank, step))
    before = trial.hook.steps
    if not ranks.exchange.takes_residual:  # what the last steps lost would come on top
        trial.step(batch(ranks.rank, 7))
        assert trial.hook.steps == before + 1


@on_ranks(4, specs=("two_level:inside=exact,across=int8,node=2", "two_level:inside=bf16,across=int4,node=2"))
def test_two_level_exchange(ranks: Ranks) -> None:
    """Many small buckets in flight on both levels, and every step is compared."""
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002)
    for step in range(4):
        trial.step(batch(ranks.rank, step))
    trial.hook.verify()


@on_ranks(4, specs=MAIN)
def test_two_sub_groups(ranks: Ranks) -> None:
    """{0, 2} and {1, 3} train a model each, and never hear of each other."""
    groups = [ranks.new_group(members) for members in ((0, 2), (1, 3))]
    trial = Trial(ranks, seeded(models.Deep, 6), group=groups[ranks.rank % 2], bucket_cap_mb=0.002)
    assert (trial.hook.rank, trial.hook.size) == (ranks.rank // 2, 2)
    for step in range(2):
        trial.step(batch(ranks.rank, step))
    assert trial.hook.verify().steps == 2


@on_ranks(4, specs=MAIN)
def test_one_sub_group_trains_alone(ranks: Ranks) -> None:
    """{2, 3} do nothing at all: {0, 1} must not need them."""
    groups = [ranks.new_group(members) for members in ((0, 1), (2, 3))]
    if ranks.rank < 2:
        trial = Trial(ranks, seeded(models.Deep, 6), group=groups[0], bucket_cap_mb=0.002)
        for step in range(2):
            trial.step(batch(ranks.rank, step))
        assert trial.hook.verify().steps == 2


@on_ranks(4, specs=MAIN)
def test_rank_in_two_groups(ranks: Ranks) -> None:
    """Rank 1 trains with rank 0, and another model with ranks 2 and 3."""
    pair, rest = ranks.new_group((0, 1)), ranks.new_group((1, 2, 3))
    members = [(pair, 0 <= ranks.rank <= 1), (rest, ranks.rank >= 1)]
    trials = [Trial(ranks, seeded(models.Deep, 3), group=group) for group, member in members if member]
    for step in range(2):
        for trial in trials:
            trial.step(batch(ranks.rank, step))


@on_ranks(2, specs=MAIN)
def test_default_group(ranks: Ranks) -> None:
    module = seeded(models.Deep, 3)
    trial = Trial(ranks, module, model=DDP(module), group=dist.group.WORLD)
    for step in range(2):
        trial.step(batch(ranks.rank, step))


@on_ranks(2, 4, specs=MAIN)
def test_device_mesh(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (ranks.size // 2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    module = seeded(models.Deep, 3)
    trial = Trial(ranks, module, model=DDP(module, device_mesh=mesh), group=mesh.get_group())
    assert trial.hook.size == 2
    for step in range(2):
        trial.step(batch(ranks.rank, step))


@on_ranks(2, specs=MAIN)
def test_two_models_in_turn(ranks: Ranks) -> None:
    first = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002)
    second = Trial(ranks, seeded(models.Deep, 4), bucket_cap_mb=0.004)
    for step in range(2):
        first.step(batch(ranks.rank, step))
        second.step(batch(ranks.rank, 10 + step))
    assert (first.hook.steps, second.hook.steps) == (2, 2)


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_two_models_in_one_backward(ranks: Ranks) -> None:
    """Buckets of both are in flight at the same time, in whatever order autograd takes them."""
    trials = [Trial(ranks, seeded(models.Deep, layers), bucket_cap_mb=0.002) for layers in (6, 4)]
    for step in range(3):
        local = [trial.local(batch(ranks.rank, step)) for trial in trials]
        for trial in trials:
            trial.optimizer.zero_grad()
        sum(loss(trial.model(batch(ranks.rank, step))) for trial in trials).backward()
        for trial, mine in zip(trials, local, strict=True):
            trial.compare(mine)
            trial.optimizer.step()


@on_ranks(2, specs=MAIN)
def test_two_models_in_two_orders(ranks: Ranks) -> None:
    """Two losses: the backward pass of the first model comes last."""
    trials = [Trial(ranks, seeded(models.Deep, layers), bucket_cap_mb=0.002) for layers in (6, 4)]
    for step in range(2):
        local = [trial.local(batch(ranks.rank, step)) for trial in trials]
        losses = [loss(trial.model(batch(ranks.rank, step))) for trial in trials]
        for trial, mine, value in reversed(list(zip(trials, local, losses, strict=True))):
            trial.optimizer.zero_grad()
            value.backward()
            trial.compare(mine)
            trial.optimizer.step()
