"""Synchronous: gradients averaged over ranks that are killed, raise, are stopped, and come back."""

import contextlib
import signal

import numpy as np
import pytest
import torch
from torch import nn

import gradwire
from gradwire._torch import TCPStore
from gradwire.errors import RegisterError
from gradwire.optim import Shrink, Synchronous
from gradwire.testing import thread_ranks

from ..kit.elastic import Crew
from ..kit.local import Net, train, values
from .test_elastic import same

SPEC = "int4:exempt=none,feedback=true"
FED_BACK = {"kind": "synchronous", "exchange": SPEC, "momentum": 0.9}


# -- ranks as processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_the_others_go_on_without_losing_a_step(fault):
    with Crew(kind="synchronous", end_size=2, seed=0) as crew:
        for number in range(3):
            crew.start(number, fault=fault if number == 2 else None, at=6)
        ends = [crew.report(place, "end") for place in (0, 1)]
    same(ends)
    assert [entry[1:] for entry in ends[0]["log"]] == [(3, 0), (2, 6)]
    np.testing.assert_allclose(ends[0]["values"], _simulated(ends[0]["steps"]), rtol=1e-4, atol=1e-5)


def _simulated(steps):
    """One model with the mean gradient of three ranks, of which the last one is gone from step 6 on."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        there = 3 if step < 6 else 2
        total = [torch.zeros_like(param) for param in model.parameters()]
        for number in range(there):
            train(model, optimizer, number, [step], average=lambda total=total: _add(model, total))
        for param, summed in zip(model.parameters(), total, strict=True):
            param.grad = summed / there
        optimizer.step()
    return values(model).numpy()


def _add(model, total):
    for param, summed in zip(model.parameters(), total, strict=True):
        summed.add_(param.grad)
    return False


def test_a_rank_comes_back_with_the_state_of_the_others():
    with Crew(end_size=4, end_epoch=2, ranks=4, **FED_BACK) as crew:
        for number in range(4):
            crew.start(number, fault="kill" if number == 0 else None, at=6)
        crew.report(1, "epoch")
        assert crew.report(1, "epoch")[1] == 3
        crew.start(0)
        ends = [crew.report(place, "end") for place in (1, 2, 3, 4)]
    same(ends)
    assert ends[3]["log"][0] == ends[0]["log"][-1]
    for mine, theirs in zip(ends[3]["momentum"], ends[0]["momentum"], strict=True):
        assert np.array_equal(mine, theirs)
    assert ends[3]["residuals"].keys() == ends[0]["residuals"].keys()


def test_a_stopped_rank_finds_that_it_is_out_and_joins_again():
    with Crew(end_size=3, end_epoch=2, timeout_s=3.0, **FED_BACK) as crew:
        for number in range(3):
            crew.start(number, fault="stop" if number == 0 else None, at=6)
        crew.report(0, "fault")
        while crew.report(1, "epoch")[1] != 2:
            pass
        crew.signal(0, signal.SIGCONT)
        ends = [crew.report(place, "end") for place in range(3)]
    same(ends)
    assert [entry[1] for entry in ends[0]["log"]] == [3, 3]


# -- ranks as threads ------------------------------------------------------------------------------------------------


@pytest.fixture
def store():
    """One that no rank hosts, and its address."""
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{made.port}"
    del made


class Probe(Synchronous):
    """Keeps what every average took and gave."""

    def _settle(self, transfer, *, may_postpone=False):
        sent, names = self._sent[transfer], transfer.fragment.names
        before = sent.delta + _flat(sent.residuals, names, sent.delta)
        assert super()._settle(transfer, may_postpone=may_postpone)
        after = _flat(self.hook.kept_of(names)[0], names, sent.delta)
        self.seen.append((self.hook.size, before, transfer.mean.clone(), after))
        return True


def _flat(residuals, names, like):
    return torch.cat([residuals[name] for name in names]) if residuals else torch.zeros_like(like)


def test_no_residual_is_lost_or_counted_twice_when_an_average_is_repeated(store):
    """Law 4 over the ranks that are left: size * mean + residuals after == gradients + residuals before."""

    def run(rank):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = Probe(model, optimizer, exchange=SPEC, on_failure=Shrink(store, ranks=3, timeout_s=30))
        training.seen = []
        with contextlib.suppress(ZeroDivisionError), training:
            train(model, optimizer, rank.rank, range(3), average=training.average)
            if rank.rank == 2:
                raise ZeroDivisionError
            train(model, optimizer, rank.rank, range(3, 6), average=training.average)
        return training.seen, values(model)

    results = thread_ranks(3, run, timeout_s=200)
    assert [size for size, *_ in results[0][0]] == [3, 3, 3, 2, 2, 2]
    for turn, (size, _, mean, _) in enumerate(results[0][0]):
        there = [results[rank][0][turn] for rank in range(size)]
        came = torch.stack([entry[1] for entry in there]).sum(0)
        kept = torch.stack([entry[3] for entry in there]).sum(0)
        torch.testing.assert_close(size * mean + kept, came, rtol=1e-4, atol=1e-5)
        assert kept.any()
    assert torch.equal(results[0][1], results[1][1])


def test_a_checkpoint_continues_exactly(store):
    """Without residuals, which the ranks share anew."""

    def run(job, spans, rank):
        model, state = Net(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for place, span in enumerate(spans):
            training = Synchronous(
                model, optimizer, exchange="int4:exempt=none", on_failure=Shrink(store, ranks=2, job=f"{job}{place}")
            )
            if state is not None:
                training.load_state_dict(state)
            with training:
                assert training.steps == span[0]
                train(model, optimizer, rank.rank, span, average=training.average)
                state = training.state_dict(merged=True)
        return values(model)

    whole = thread_ranks(2, lambda rank: run("whole", [range(8)], rank), timeout_s=200)
    parts = thread_ranks(2, lambda rank: run("parts", [range(3), range(3, 8)], rank), timeout_s=200)
    assert torch.equal(whole[0], whole[1])
    assert torch.equal(parts[0], whole[0])


def test_a_parameter_without_a_gradient_takes_part_with_zeros(store):
    def run(rank):
        model = nn.ModuleList([nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Synchronous(model, optimizer, on_failure=Shrink(store, ranks=2)) as training:
            mine = training.hook.rank
            model[mine](torch.ones(3)).sum().backward()
            assert training.average()
            optimizer.step()
        return [param.grad.tolist() for param in model.parameters()]

    assert thread_ranks(2, run, timeout_s=100) == [[[[0.5] * 3]] * 2] * 2


# -- input -----------------------------------------------------------------------------------------------------------


def test_a_step_without_an_average_is_refused(store):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RegisterError, match=r"optimizer.step\(\) without average\(\)"),
        Synchronous(model, optimizer, on_failure=Shrink(store)),
    ):
        train(model, optimizer, 0, [0])


def test_other_uses_are_refused(store):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RegisterError, match="without that use DDP and"):
        Synchronous(model, optimizer, on_failure="raise")
    with pytest.raises(RegisterError, match="for the body of the 'with' statement"):
        Synchronous(model, optimizer, on_failure=Shrink(store)).average()
    with pytest.raises(RegisterError, match=r"fixed set of ranks.*gradwire\.optim\.Synchronous"):
        gradwire.register(model, "int8", on_failure="shrink")
