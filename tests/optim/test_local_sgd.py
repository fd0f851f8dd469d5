"""LocalSGD and DiLoCo against a simulation: values, types, turns, overlap and errors."""

import copy
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from gradwire.engine.fingerprint import fingerprint
from gradwire.errors import ExchangeError
from gradwire.exchanges import Exact
from gradwire.optim import DiLoCo, LocalSGD

from ..kit.local import SPECS, Net, on_ranks, simulated, train, values


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_sync_at_every_step_averages_parameters(kind, size):
    outer = {} if kind is LocalSGD else {"outer_lr": 1.0, "outer_momentum": 0.0}

    def run(rank, group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with kind(model, optimizer, sync_every=1, process_group=group, **outer):
            train(model, optimizer, rank.rank, range(20))
        return values(model)

    nets = [Net() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for step in range(20):
        for rank in range(size):
            train(nets[rank], optimizers[rank], rank, [step])
        mean = [torch.stack(same).mean(0) for same in zip(*(net.parameters() for net in nets), strict=True)]
        for net in nets:
            for param, value in zip(net.parameters(), mean, strict=True):
                param.data.copy_(value)
    for got in on_ranks(size, run):
        torch.testing.assert_close(got, values(nets[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 2), (3, 0), (3, 3)])
def test_diloco_equals_the_simulation(size, fragments, delay):
    """20 steps of rounds of 5: the parameters of every rank, and the global ones."""

    def run(rank, group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, sync_every=5, fragments=fragments, delay=delay, process_group=group) as rounds:
            train(model, optimizer, rank.rank, range(20))
            cut = {name: fragment.index for fragment in rounds.fragments for name in fragment.names}
            return values(model), {name: value.clone() for name, value in rounds.named_globals()}, cut

    results = on_ranks(size, run)
    nets, outer = simulated(size, 20, 5, lr=0.7, momentum=0.9, fragments=fragments, delay=delay, cut=results[0][2])
    for (got, globals_, _), net in zip(results, nets, strict=True):
        torch.testing.assert_close(got, values(net), rtol=1e-4, atol=1e-5)
        for name, param in outer.named_parameters():
            torch.testing.assert_close(globals_[name], param.detach(), rtol=1e-4, atol=1e-5)
            assert torch.equal(globals_[name], results[0][1][name])


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_hold_the_same_bits_after_a_sync(spec):
    def run(rank, group):
        model, seen = Net(seed=rank.rank), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with LocalSGD(model, optimizer, sync_every=4, exchange=spec, process_group=group) as rounds:
            seen.append(values(model))
            for step in range(10):
                train(model, optimizer, rank.rank, [step])
                seen.append(values(model))
            assert rounds.hook.verify().identical
        return [*seen, values(model)]

    one, other = on_ranks(2, run)
    same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert same == [True, False, False, False, True, False, False, False, True, False, False, True]
    assert torch.equal(one[0], values(Net(seed=0)))
    assert torch.isfinite(one[-1]).all()


def test_fragments_are_of_similar_size_and_synchronised_in_turn():
    """24 equal layers in 4 fragments: a quarter of the values every second step of 8."""

    def run(rank, group):
        model, sent = nn.Sequential(*[nn.Linear(6, 6) for _ in range(24)]), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with DiLoCo(model, optimizer, sync_every=8, fragments=4, process_group=group) as rounds:
            for _ in range(16):
                optimizer.step()
                stats = rounds.hook.stats()
                sent.append(round(stats.sent_bytes * max(stats.steps, 1)) if not rounds.transfers else -1)
            sent_at = list(rounds.sent_at)
        return [fragment.numel for fragment in rounds.fragments], sent_at, sent

    for numels, sent_at, sent in on_ranks(2, run):
        assert numels == [6 * 42] * 4
        assert sent_at == [10, 12, 14, 16]
        quarter = 6 * 42 * 4  # bytes: at 2 ranks a ring sends every value once
        assert sent == [
            *(0, -1, quarter, -1, 2 * quarter, -1, 3 * quarter, -1),
            *(4 * quarter, -1, 5 * quarter, -1, 6 * quarter, -1, 7 * quarter, -1),
        ]


@dataclass(frozen=True)
class Held(Exact):
    """Averages when `go` is set."""

    go: threading.Event = field(default_factory=threading.Event)

    def __str__(self):
        return "held"

    def mean_(self, bucket, comm, residual=None):
        assert self.go.wait(20)
        Exact.mean_(self, bucket, comm, residual)


def test_training_continues_during_the_exchange():
    def run(rank, group):
        model, exchange = Net(), Held()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, sync_every=4, delay=3, exchange=exchange, process_group=group) as rounds:
            train(model, optimizer, rank.rank, range(6))  # departs after the 4th
            assert not rounds.transfers[0].future.done()
            exchange.go.set()
            train(model, optimizer, rank.rank, [6])
            assert not rounds.transfers

    on_ranks(2, run)


class Breaks(Exact):
    """Fails on one rank."""

    def mean_(self, bucket, comm, residual=None):
        if comm.rank == 1:
            raise KeyError("no such thing")
        Exact.mean_(self, bucket, comm, residual)


def test_error_on_one_rank_reaches_all_ranks():
    def run(rank, group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        text = ""
        try:
            with LocalSGD(model, optimizer, sync_every=2, exchange=Breaks(), process_group=group):
                train(model, optimizer, rank.rank, range(2))
        except ExchangeError as error:
            text = str(error)
        train(model, optimizer, rank.rank, range(2, 6))  # the optimizer is free again
        return text

    for text in on_ranks(2, run):
        assert "averaging parameters at step 2 failed" in text
        assert "no such thing" in text


def test_error_in_the_loop_leaves_the_parameters_unchanged():
    def run(rank, group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rounds = LocalSGD(model, optimizer, sync_every=5, process_group=group)
        with suppress(ZeroDivisionError), rounds:
            train(model, optimizer, rank.rank, range(3))
            before = values(model)
            raise ZeroDivisionError
        assert rounds.hook.closed
        assert torch.equal(before, values(model))
        return before

    one, other = on_ranks(2, run)
    assert not torch.equal(one, other)


class Odd(nn.Module):
    """Every type, and strides of its own."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.rounded = nn.Parameter(torch.randn(40, generator=generator).bfloat16())
        self.wide = nn.Parameter(torch.randn(3, 5, generator=generator).double().t())
        self.spin = nn.Parameter(torch.randn(4, 2, generator=generator, dtype=torch.complex64))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (6, 2)])
def test_types_strides_and_storages_are_kept(fragments, delay):
    def run(rank, group):
        model = Odd()
        form = [(p.dtype, p.stride(), p.data_ptr()) for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        start = copy.deepcopy(model)
        with LocalSGD(model, optimizer, sync_every=6, fragments=fragments, delay=delay, process_group=group):
            for _ in range(6):
                for param in model.parameters():
                    param.grad = torch.full_like(param, 0.25 * (rank.rank + 1))
                optimizer.step()
        assert form == [(p.dtype, p.stride(), p.data_ptr()) for p in model.parameters()]
        for param, old in zip(model.parameters(), start.parameters(), strict=True):
            tolerance = {"rtol": 1e-2, "atol": 2e-2} if param.dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(param.detach(), old.detach() - 6 * 0.25 * 1.5, **tolerance)
        return [int(fingerprint(param)) for param in model.parameters() if param.numel()]

    one, other = on_ranks(2, run)
    assert one == other


def test_bfloat16_parameter_without_updates_keeps_its_global_value():
    """The global value of a bfloat16 parameter has more digits than the parameter; the difference is no movement."""

    def run(rank, group):
        model = nn.Linear(8, 8, bias=False).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, optimizer, sync_every=2, outer_lr=0.3, outer_momentum=0.0, process_group=group) as rounds:
            for step in range(20):
                model.weight.grad = torch.full_like(model.weight, 1.0 if step < 2 else 0.0)
                optimizer.step()
                if step == 5:
                    early = rounds.globals[0].clone()
            assert torch.equal(rounds.globals[0], early)
            assert not torch.equal(early.bfloat16().float(), early)

    on_ranks(2, run)
