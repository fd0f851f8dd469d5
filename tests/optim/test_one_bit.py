"""OneBitAdamW: like AdamW while it sends gradients, the same bits on all ranks always, and robust where 1 bit fails."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import gradwire
from gradwire.errors import RegisterError, SpecError, StateError
from gradwire.optim import OneBitAdamW
from gradwire.optim.one_bit import GUARD_STEPS, MOST_RARELY

from ..kit import models
from ..kit.local import on_ranks as on_threads
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.trial import raised

pytestmark = pytest.mark.usefixtures("one_thread")
SENT = {"gradient": "int2:whiten=true,exempt=none", "momentum": "sign:feedback=true,exempt=none,block=64"}


class Net(nn.Module):
    """Learns to map normal inputs through a fixed matrix."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(24, 16, generator=generator) / 4)
        self.second = nn.Parameter(torch.randn(24, 16, generator=generator).t() / 5)
        self.wanted = torch.randn(16, 16, generator=generator)

    def forward(self, x):
        return torch.tanh(x @ self.first.t()) @ self.second.t()

    def loss(self, rank, step):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        return (self(x) - torch.tanh(x @ self.wanted)).square().mean()


def train(net, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        net.loss(rank, step).backward()
        optimizer.step()


def values(net):
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def held_out(net):
    with torch.no_grad():
        return float(sum(net.loss(99, step) for step in range(1000, 1010)) / 10)


def test_training_reaches_the_loss_of_adamw_with_the_same_bits_on_all_ranks():
    def run(rank, group):
        net = Net()
        optimizer = OneBitAdamW(net.parameters(), lr=3e-3, warmup=20, process_group=group, **SENT)
        train(net, optimizer, rank.rank, range(200))
        assert [checked.identical for checked in optimizer.verify().values()] == [True, True]
        optimizer.close()
        return values(net), held_out(net)

    def exact(net, optimizer):
        for step in range(200):
            optimizer.zero_grad()
            sum(net.loss(rank, step) for rank in range(3)).div(3).backward()
            optimizer.step()
        return held_out(net)

    results = on_threads(3, run)
    assert all(torch.equal(results[0][0], other) for other, _ in results)
    net, start = Net(), held_out(Net())
    wanted = exact(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    assert results[0][1] - wanted < 0.1 * (start - wanted)


def test_the_first_steps_are_those_of_adamw():
    def run(rank, group):
        net = Net()
        optimizer = OneBitAdamW(net.parameters(), lr=1e-2, weight_decay=0.1, clamp=100.0, process_group=group)
        train(net, optimizer, rank.rank, range(12))
        optimizer.close()
        return values(net)

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(12):
        optimizer.zero_grad()
        sum(net.loss(rank, step) for rank in range(2)).div(2).backward()
        optimizer.step()
    got = on_threads(2, run)[0]
    assert (got - values(net)).norm() < 0.01 * (values(net) - values(Net())).norm()


def test_a_checkpoint_resumes_with_the_same_bits_and_another_number_of_ranks_keeps_the_sum_of_residuals():
    def make(net, group):
        return OneBitAdamW(net.parameters(), lr=1e-2, warmup=20, refresh=4, process_group=group, **SENT)

    def run(rank, group):
        net, file = Net().bfloat16().float(), io.BytesIO()
        optimizer = make(net, group)
        train(net, optimizer, rank.rank, range(30))
        torch.save([net.state_dict(), optimizer.state_dict()], file)
        train(net, optimizer, rank.rank, range(30, 40))
        file.seek(0)
        weights, state = torch.load(file)
        again = Net()
        again.load_state_dict(weights)
        other = make(again, group)
        other.load_state_dict(state)
        train(again, other, rank.rank, range(30, 40))
        assert torch.equal(values(net), values(again))
        optimizer.close(), other.close()
        return weights, state

    saved = on_threads(3, run)

    def residual(state):
        (kept,) = state["one_bit"]["hooks"]["momentum"]
        return torch.cat([kept["residuals"][name] for name in sorted(kept["residuals"])])

    def resume(rank, group):
        net = Net()
        net.load_state_dict(saved[0][0])
        optimizer = make(net, group)
        optimizer.load_state_dict([state for _, state in saved])
        train(net, optimizer, rank.rank, [])
        optimizer._hook("momentum")
        before = residual(optimizer.state_dict())
        train(net, optimizer, rank.rank, range(30, 34))
        optimizer.close()
        return before, values(net)

    resumed = on_threads(2, resume)
    total = sum(residual(state) for _, state in saved)
    assert total.abs().max() > 0
    torch.testing.assert_close(sum(before for before, _ in resumed), total)
    assert torch.equal(resumed[0][1], resumed[1][1])


def test_a_rank_with_an_inf_makes_all_ranks_skip_the_step():
    def run(rank, group):
        net = Net()
        optimizer = OneBitAdamW(net.parameters(), lr=1e-2, warmup=16, process_group=group, **SENT)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        moved = []
        for step in range(24):
            optimizer.zero_grad()
            bad = step in (2, 20) and rank.rank == 1
            scaler.scale(net.loss(rank.rank, step) * (torch.inf if bad else 1.0)).backward()
            before = values(net)
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before, values(net)))
        kinds = optimizer.stats()
        optimizer.close()
        return values(net), moved, kinds["momentum"].steps

    (one, moved, momentum_steps), (other, _, _) = on_threads(2, run)
    assert torch.equal(one, other)
    assert [step for step, has in enumerate(moved) if not has] == [2, 20]
    assert momentum_steps > 3


def test_groups_schedulers_and_groups_that_come_later():
    def run(rank, group):
        net = Net()
        groups = [{"params": [net.first], "lr": 0.0}, {"params": [net.second]}]
        optimizer = OneBitAdamW(groups, lr=1e-2, warmup=2, refresh=2, process_group=group, **SENT)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
        seen = []
        for step in range(5):
            train(net, optimizer, rank.rank, [step])
            scheduler.step()
            seen.append([param.detach().clone() for param in net.parameters()])
        late = nn.Parameter(torch.ones(8))
        optimizer.add_param_group({"params": [late], "lr": 1.0})
        before = optimizer.state[net.second]["exp_avg"].clone()
        late.grad = torch.ones(8)
        optimizer.parts()
        assert torch.equal(optimizer.state[net.second]["exp_avg"], before)
        optimizer.close()
        return seen

    seen = on_threads(2, run)[0]
    assert all(torch.equal(first, Net().first) for first, _ in seen)
    assert not torch.equal(seen[2][1], seen[1][1])
    assert torch.equal(seen[4][1], seen[3][1])


@on_ranks(2)
def test_a_ddp_model_leaves_the_gradients_to_the_optimizer(ranks: Ranks) -> None:
    plain = seeded(models.Deep)
    model = ranks.wrap(copy.deepcopy(plain))
    one = OneBitAdamW(plain.parameters(), lr=1e-2, warmup=17, process_group=ranks.group)
    two = OneBitAdamW(model.parameters(), lr=1e-2, warmup=17, model=model)
    for step in range(22):
        for module, optimizer in ((plain, one), (model, two)):
            optimizer.zero_grad()
            module(batch(ranks.rank, step)).square().mean().backward()
            optimizer.step()
    assert torch.equal(values(plain), values(model))
    assert two.stats()["momentum"].steps == one.stats()["momentum"].steps > 0
    text = raised(RegisterError, lambda: OneBitAdamW(model.parameters(), model=model))
    assert "already has the gradwire hook" in text
    one.close(), two.close()


def plain_one(**options):
    return OneBitAdamW([nn.Parameter(torch.zeros(4, 4))], **options)


@torch.no_grad()
def test_refreshes_follow_the_drift_and_a_jump_brings_gradients_back():
    optimizer = plain_one(warmup=3, refresh=4)
    kinds = []
    for _ in range(11):
        kinds.append(optimizer.next_kind[0])
        optimizer._take(optimizer.next_kind, [torch.ones(16)])
    assert "".join(kinds) == "gggmmmgmmmg"
    for _ in range(40):
        optimizer._adapt([(10, 100), (0, 10)])
    assert optimizer._interval == 4 * MOST_RARELY
    optimizer._adapt([(60, 100), (0, 10)])
    assert optimizer._interval == 2 * MOST_RARELY
    optimizer._adapt([(40, 100)])
    assert optimizer._interval == 2 * MOST_RARELY
    optimizer._guard([torch.full((16,), optimizer._usual * 1.4)])
    assert optimizer.next_kind == "momentum"
    optimizer._guard([torch.full((16,), optimizer._usual * 1.6)])
    assert optimizer.next_kind == "gradient"
    assert optimizer._guard_until == optimizer._count + GUARD_STEPS


def test_drift_is_counted_by_blocks():
    (part,) = plain_one(betas=(0.9, 0.5)).parts()
    part.moment, gradient = torch.ones(1024), torch.ones(1024)
    gradient[:256], gradient[256:512], gradient[512:768] = 3.0, 1.9, 0.1
    assert part.drifted(gradient, 10) == (2, 4)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"clamp": 0.0}, {"warmup": 0}, {"refresh": 1.5}, {"model": 3}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(SpecError, match="must be"):
        plain_one(**wrong)


def test_the_state_of_another_optimizer_is_refused():
    param = nn.Parameter(torch.zeros(2))
    with pytest.raises(StateError, match="not a state of OneBitAdamW"):
        OneBitAdamW([param]).load_state_dict(torch.optim.AdamW([param]).state_dict())
    assert gradwire.optim.OneBitAdamW is OneBitAdamW
