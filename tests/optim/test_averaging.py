"""Averaging of parameters: what torch's averagers do, without what they spoil."""

import copy
import warnings

import pytest
import torch
from torch import nn

from gradwire.engine.fingerprint import fingerprint
from gradwire.errors import RegisterError, SpecError, StateError
from gradwire.optim import LocalSGD, PeriodicModelAverager, PostLocalSGDOptimizer

from ..kit.local import Net, on_ranks, train, values


def test_averages_once_per_period_after_the_warmup():
    """Period 3 from step 2 on: after the counts of 2, 5 and 8, and then all ranks have the mean."""

    def run(rank, group):
        averager, param, seen = PeriodicModelAverager(3, 2, group), nn.Parameter(torch.zeros(5)), []
        for step in range(10):
            param.data.fill_(float(10 * step + rank.rank))
            averager.average_parameters([{"params": [param]}])
            seen.append(float(param.detach()[0]))
        averager.close()
        return seen

    for rank, seen in enumerate(on_ranks(3, run)):
        assert seen == [10.0 * step + (1 if step in (2, 5, 8) else rank) for step in range(10)]


def test_types_strides_and_storages_are_kept():
    """torch's 3.33: a parameter stays where it is and as it is laid out."""

    def run(rank, group):
        params = [
            nn.Parameter(torch.full((2, 3, 4, 4), 1.0 + rank.rank).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.full((7,), 3.0 * rank.rank, dtype=torch.float64)),
            nn.Parameter(torch.full((5,), 1.0 + rank.rank, dtype=torch.bfloat16)),
            nn.Parameter(torch.full((3,), complex(rank.rank, 2), dtype=torch.complex64)),
            nn.Parameter(torch.full((4,), float(rank.rank)), requires_grad=False),
        ]
        params[0].data[0, 1, 2, 3] = 8.0 * rank.rank
        form = [(param.dtype, param.stride(), param.data_ptr()) for param in params]
        PeriodicModelAverager(2, process_group=group).average_parameters(params)
        assert form == [(param.dtype, param.stride(), param.data_ptr()) for param in params]
        assert float(params[0].detach()[0, 1, 2, 3]) == 4.0
        return [complex(param.detach().flatten()[0]) for param in params]

    assert on_ranks(2, run) == [[1.5, 1.5, 1.5, 0.5 + 2j, 0], [1.5, 1.5, 1.5, 0.5 + 2j, 1]]


def test_each_parameter_is_averaged_with_itself():
    """torch's 3.33: ranks that have gradients for different parameters do not mix these."""

    def run(rank, group):
        params = [nn.Parameter(torch.full((3,), value)) for value in (1.0, 100.0)]
        params[rank.rank].grad = torch.ones(3)
        PeriodicModelAverager(2, process_group=group).average_parameters(params)
        return [float(param.detach()[0]) for param in params]

    assert on_ranks(2, run) == [[1.0, 100.0]] * 2


@pytest.mark.parametrize(
    "spec", ["bf16", "int8", "int4:exempt=none,feedback=true", "powersgd:rank=1,min_compression=1"]
)
def test_parameters_are_averaged_by_any_exchange(spec):
    def run(rank, group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        averager = PeriodicModelAverager(2, process_group=group, exchange=spec)
        both = PostLocalSGDOptimizer(optimizer, averager)
        train(model, both, rank.rank, range(5))  # the last average is after the fifth step
        return [int(fingerprint(param)) for param in model.parameters()], values(model)

    (one, got), (other, _) = on_ranks(2, run)
    assert one == other
    assert torch.isfinite(got).all()


def test_resuming_restores_the_residual():
    def make(group):
        model = Net()
        averager = PeriodicModelAverager(3, 1, group, exchange="int4:exempt=none,feedback=true")
        return model, PostLocalSGDOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), averager)

    def run(rank, group):
        model, optimizer = make(group)
        train(model, optimizer, rank.rank, range(9))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, rank.rank, range(9, 20))
        again = make(group)
        for part, state in zip(again, saved, strict=True):
            part.load_state_dict(state)
        pending = saved[1]["averager"]["exchange"]["all"][0]["residuals"]["0"]
        assert pending.abs().max() > 0
        waiting = again[1].state_dict()["averager"]["exchange"]["all"][0]["residuals"]["0"]
        assert torch.equal(waiting, pending)  # also before the first average
        train(*again, rank.rank, range(9, 20))
        assert torch.equal(values(again[0]), values(model))
        return saved[1]["averager"]

    states = on_ranks(2, run)

    def elsewhere(rank, group):
        averager, model = PeriodicModelAverager(3, 1, group, exchange="int4:exempt=none,feedback=true"), Net()
        averager.load_state_dict(states[0])
        averager.step = 1
        with pytest.raises(StateError, match="state of rank 0 of 2 given to rank"):
            averager.average_parameters(model.parameters())
        averager.load_state_dict(states)
        assert averager.step == 9
        for _ in range(3):
            averager.average_parameters(model.parameters())
        return values(model)

    results = on_ranks(3, elsewhere)
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], values(Net()))


class Counts(PeriodicModelAverager):
    """An averager without a group: counts its calls."""

    def __init__(self):
        self.step = 0

    def average_parameters(self, params):
        self.step += 1

    state_dict = load_state_dict = None


def test_optimizer_supports_closures_hooks_and_schedulers():
    """Closures, hooks, schedulers, new groups; and after loading, the groups are those of the optimizer inside."""
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, called = PostLocalSGDOptimizer(inner, Counts()), []
    optimizer.register_step_post_hook(lambda *_: called.append(optimizer.averager.step))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.05
    assert called == [1]
    state = copy.deepcopy(optimizer.state_dict())
    assert state["step"] == 1
    optimizer.load_state_dict(state)
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.025  # torch's own keeps the old groups here
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    assert optimizer.state is inner.state
    assert repr(optimizer) == repr(inner)


def test_state_without_a_step_count_warns():
    inner = torch.optim.SGD(Net().parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, Counts())
    optimizer.averager.step = 7
    with pytest.warns(UserWarning, match="starts from 0"):
        optimizer.load_state_dict(inner.state_dict())
    assert optimizer.averager.step == 0


def test_local_sgd_counts_its_steps():
    def run(rank, group):
        model = Net()
        averager = PeriodicModelAverager(5, process_group=group)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        with LocalSGD(model, optimizer, sync_every=4, process_group=group) as rounds:
            train(model, optimizer, rank.rank, range(3))
            return rounds.steps

    assert on_ranks(2, run) == [3, 3]


def test_bad_input_is_refused():
    def run(rank, group):
        for arguments, message in [
            ((0,), "period must be a whole number of at least 1, got 0"),
            ((2.5,), "period must be a whole number"),
            ((2, -1), "warmup_steps must be a whole number of at least 0, got -1"),
        ]:
            with pytest.raises(SpecError, match=message):
                PeriodicModelAverager(*arguments, process_group=group)
        with pytest.raises(SpecError, match="unknown hook"):
            PeriodicModelAverager(2, process_group=group, exchange="int99")
        averager = PeriodicModelAverager(2, process_group=group)
        with pytest.raises(TypeError, match="got str"):
            averager.average_parameters("ab")
        with pytest.raises(StateError, match="not a state of an averager"):
            averager.load_state_dict({"step": 1})
        with pytest.raises(RegisterError, match="nothing to average"):
            averager.average_parameters([])

    on_ranks(1, run)
    with pytest.raises(RegisterError, match="takes an optimizer and a model averager, got NoneType and NoneType"):
        PostLocalSGDOptimizer(None, None)
    with pytest.raises(RegisterError, match="there is no process group"):
        PeriodicModelAverager(2)


def test_ranks_with_other_parameters_are_refused():
    def run(rank, group):
        averager = PeriodicModelAverager(2, process_group=group)
        with pytest.raises(RegisterError, match=r"same parameters, got rank 0 '1 tensors.*rank 1 '1 tensors"):
            averager.average_parameters([nn.Parameter(torch.ones(3 + rank.rank))])

    on_ranks(2, run)


def test_period_of_one_warns():
    def run(rank, group):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PeriodicModelAverager(1, process_group=group)
        return [str(warning.message) for warning in caught]

    assert "period of 1" in on_ranks(1, run)[0][0]
