"""Post-local SGD: the hook, alone and with averaging of parameters, compared with torch's."""

import copy
import inspect
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire import optim
from gradwire.ddp_comm_hooks import post_localSGD_hook as ours
from gradwire.errors import RegisterError, SpecError, StateError

from ..kit.local import train, values
from ..kit.ranks import on_ranks


def TorchsOptimizer(*args):
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns of torch's own deprecated parts

    return PostLocalSGDOptimizer(*args)


SHAPE = (8, 6, 3)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))


def halves(rank, size):
    """Sub-groups of half the ranks."""
    groups = [dist.new_group(list(range(start, start + size // 2))) for start in (0, size // 2)]
    return groups[rank // (size // 2)]


def trained(rank, side, subgroup, local, optimizer_of, averager, steps=20):
    """A model after `steps` steps: exact for 6, then local, with parameters averaged by `averager`."""
    model = DDP(make_model(), bucket_cap_mb=0.002)
    state = side.PostLocalSGDState(None, subgroup, 6, local)
    model.register_comm_hook(state, side.post_localSGD_hook)
    optimizer = optimizer_of(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averager)
    train(model, optimizer, rank, range(steps), SHAPE)
    return values(model), state


@on_ranks(2, thorough=(4,))
def test_twenty_steps_equal_torchs(ranks):
    """Ours trains what torch's does, whichever of the parts are torch's."""
    subgroup = halves(ranks.rank, ranks.size)
    for local in (True, False):
        wanted, frozen = trained(
            ranks.rank, torchs, subgroup, local, TorchsOptimizer, averagers.PeriodicModelAverager(4, 6)
        )
        assert frozen.iter == 6  # torch's 3.26
        for optimizer_of, averager_of in [
            (optim.PostLocalSGDOptimizer, optim.PeriodicModelAverager),
            (TorchsOptimizer, optim.PeriodicModelAverager),
            (optim.PostLocalSGDOptimizer, averagers.PeriodicModelAverager),
        ][: 3 if local else 1]:
            got, state = trained(ranks.rank, ours, subgroup, local, optimizer_of, averager_of(4, 6))
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
            assert state.iter == 20


@on_ranks(thorough=(4,))
def test_hierarchy_equals_torchs(ranks):
    """Pairs every 2 steps and all every 4: the same as torch's."""
    levels = {2: 2, 4: ranks.size}
    for warmup in (0, 3):
        wanted, _ = trained(
            ranks.rank,
            torchs,
            dist.group.WORLD,
            False,
            TorchsOptimizer,
            hierarchical_model_averager.HierarchicalModelAverager(levels, warmup),
            19,
        )
        for optimizer_of in (TorchsOptimizer, optim.PostLocalSGDOptimizer):
            averager = optim.HierarchicalModelAverager(levels, warmup)
            got, _ = trained(ranks.rank, ours, None, False, optimizer_of, averager, 19)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
            assert list(averager.state_dict()["exchange"]) == ["4", "2"]
            everyone = [torch.empty_like(got) for _ in range(ranks.size)]
            dist.all_gather(everyone, got)  # the last average, at the count of 18, was over pairs
            assert torch.equal(everyone[0], everyone[1])
            assert not torch.equal(everyone[0], everyone[2])


@on_ranks(2, thorough=(4,))
def test_levels_count_ranks_of_their_group(ranks):
    """Neighbours are counted within the group given, not within the world."""
    members = [1, 3] if ranks.size == 4 else [0, 1]
    group = dist.new_group(members)
    if ranks.rank in members:
        averager = optim.HierarchicalModelAverager({2: 1, 4: 2}, process_group=group)
        param = nn.Parameter(torch.full((3,), float(ranks.rank)))
        averager.average_parameters([param])
        torch.testing.assert_close(param.detach(), torch.full((3,), sum(members) / 2))
        averager.step = 2
        param.data.fill_(ranks.rank)
        averager.average_parameters([param])
        torch.testing.assert_close(param.detach(), torch.full((3,), float(ranks.rank)))
    for wrong, message in [
        ({}, "at least one"),
        (None, "at least one"),
        ({0: ranks.size}, "at least 1, got 0"),
        ({2: ranks.size, 4: 1}, "sorted by period, with groups that grow"),
        ({4: 1, 2: ranks.size}, "sorted by period, with groups that grow"),
        ({2: 1}, f"that of the process group \\({ranks.size}\\), got 1"),
        ({2: 3, 4: ranks.size}, "divide|groups that grow"),
    ]:
        with pytest.raises(SpecError, match=message):
            optim.HierarchicalModelAverager(wrong)


@on_ranks(2, thorough=(4,))
def test_default_sub_group_is_the_machine(ranks):
    """Without a sub-group: the ranks of this machine, without an accelerator too (torch's 3.26)."""
    state = ours.PostLocalSGDState(None, None, 0)
    assert dist.get_process_group_ranks(state.subgroup) == list(range(ranks.size))
    os.environ["GROUP_RANK"] = str(ranks.rank % 2)
    try:
        state = ours.PostLocalSGDState(None, None, 0)
    finally:
        del os.environ["GROUP_RANK"]
    near = list(range(ranks.rank % 2, ranks.size, 2))
    assert dist.get_process_group_ranks(state.subgroup) == near
    model = DDP(nn.Linear(3, 1, bias=False))
    model.register_comm_hook(state, ours.post_localSGD_hook)
    model(torch.full((1, 3), float(ranks.rank))).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), sum(near) / len(near)))


@on_ranks(2)
def test_pickled_state_needs_its_groups_again(ranks):
    """A state with a sub-group can be pickled (torch's 3.22); the groups must be given anew, not guessed."""
    subgroup = halves(ranks.rank, ranks.size)
    state = ours.PostLocalSGDState(dist.group.WORLD, subgroup, 1)
    model = DDP(nn.Linear(3, 1, bias=False))
    model.register_comm_hook(state, ours.post_localSGD_hook)
    model(torch.full((1, 3), float(ranks.rank))).sum().backward()
    again = pickle.loads(pickle.dumps(state))
    assert (again.iter, again.start_localSGD_iter, again.post_local_gradient_allreduce) == (1, 1, True)
    other = DDP(nn.Linear(3, 1, bias=False))
    other.register_comm_hook(again, ours.post_localSGD_hook)
    with pytest.raises(RuntimeError, match=r"lost its groups: set state\.subgroup"):
        other(torch.full((1, 3), float(ranks.rank))).sum().backward()
    again.subgroup = subgroup
    last = DDP(nn.Linear(3, 1, bias=False))
    last.register_comm_hook(again, ours.post_localSGD_hook)
    last(torch.full((1, 3), float(ranks.rank))).sum().backward()
    members = dist.get_process_group_ranks(subgroup)
    torch.testing.assert_close(last.module.weight.grad, torch.full((1, 3), sum(members) / len(members)))
    fresh = ours.PostLocalSGDState(None, subgroup, 4)
    fresh.load_state_dict(state.state_dict())
    assert fresh.iter == 1
    with pytest.raises(StateError, match="'iter'"):
        fresh.load_state_dict({})


@on_ranks(2, thorough=(4,))
def test_resuming_is_exact(ranks):
    """Hook, optimizer and averager resume exactly in the middle of a period, with the residual."""
    subgroup = halves(ranks.rank, ranks.size)

    def make():
        model = DDP(make_model())
        state = ours.PostLocalSGDState(None, subgroup, 5)
        model.register_comm_hook(state, ours.post_localSGD_hook)
        averager = optim.PeriodicModelAverager(4, 3, exchange="int8:feedback=true")
        return model, state, optim.PostLocalSGDOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), averager)

    model, state, optimizer = make()
    train(model, optimizer, ranks.rank, range(9), SHAPE)
    saved = copy.deepcopy([part.state_dict() for part in (model, state, optimizer)])
    train(model, optimizer, ranks.rank, range(9, 20), SHAPE)
    resumed = make()
    for part, kept in zip(resumed, saved, strict=True):
        part.load_state_dict(kept)
    train(resumed[0], resumed[2], ranks.rank, range(9, 20), SHAPE)
    assert torch.equal(values(resumed[0]), values(model))
    assert resumed[1].iter == 20
    assert resumed[2].averager.step == 20


@on_ranks(2)
def test_bad_input_is_refused(ranks):
    """Bad input is an error when the state is made."""
    other = dist.new_group([0])
    if ranks.rank:
        with pytest.raises(SpecError, match="subgroup must be a process group that this rank is in"):
            ours.PostLocalSGDState(None, other, 3)
        with pytest.raises(RegisterError, match="not in the process group"):
            optim.PeriodicModelAverager(2, process_group=other)
    for wrong in (-1, 2.5, None):
        with pytest.raises(SpecError, match="start_localSGD_iter must be a whole number of at least 0"):
            ours.PostLocalSGDState(None, dist.group.WORLD, wrong)
    with pytest.raises(RegisterError, match="compiled reducer"):
        ours.post_localSGD_hook(ours.PostLocalSGDState(None, dist.group.WORLD, 3), (torch.ones(1), torch.ones(1)))


@pytest.mark.parametrize("name", ["PostLocalSGDState", "post_localSGD_hook"])
def test_same_parameters_as_torchs(name):
    mine, theirs = (list(inspect.signature(getattr(side, name)).parameters) for side in (ours, torchs))
    assert mine == theirs
