"""Local training with on_failure="shrink": ranks that are killed, stopped, left out, and that come back."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire._torch import TCPStore
from gradwire.errors import RegisterError, SpecError
from gradwire.optim import DiLoCo, LocalSGD, Shrink
from gradwire.optim.handover import packed, unpacked
from gradwire.optim.members import FAILED, GO, Members
from gradwire.optim.outside import OutsideStore
from gradwire.testing import thread_ranks

from ..kit.elastic import Crew
from ..kit.local import Net, train, values

SPEC = "int4:exempt=none,feedback=true"
STREAMING = {"kind": "diloco", "exchange": SPEC, "fragments": 2, "delay": 1, "momentum": 0.9}


def same(ends):
    """All ranks that were there at the end hold the same bits, of the same step."""
    for end in ends[1:]:
        assert np.array_equal(end["values"], ends[0]["values"])
        assert end["steps"] == ends[0]["steps"]


# -- ranks as processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_two_of_three_ranks_go_on_with_all_their_steps(fault):
    with Crew(end_size=2, seed=0) as crew:
        for number in range(3):
            crew.start(number, fault=fault if number == 2 else None, at=6)
        ends = [crew.report(place, "end") for place in (0, 1)]
    same(ends)
    assert [entry[1:] for entry in ends[0]["log"]] == [(3, 0), (2, 8)]
    np.testing.assert_allclose(ends[0]["values"], _simulated(), rtol=1e-4, atol=1e-5)


def _simulated():
    """Rounds of 4 steps on 3 ranks, of which the last one does not come to the second average."""
    nets = [Net() for _ in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for first in range(0, 16, 4):
        there = 3 if first == 0 else 2
        for number in range(there):
            train(nets[number], optimizers[number], number, range(first, first + 4))
        mean = [torch.stack(same).mean(0) for same in zip(*(net.parameters() for net in nets[:there]), strict=True)]
        for net in nets:
            for param, value in zip(net.parameters(), mean, strict=True):
                param.data.copy_(value)
    return values(nets[0]).numpy()


def test_a_rank_comes_back_with_the_state_of_the_others():
    with Crew(end_size=3, end_epoch=2, **STREAMING) as crew:
        for number in range(3):
            crew.start(number, fault="kill" if number == 2 else None, at=6)
        crew.report(0, "epoch")
        assert crew.report(0, "epoch")[1] == 2
        crew.start(2)
        ends = [crew.report(place, "end") for place in (0, 1, 3)]
    same(ends)
    assert ends[2]["log"][0] == ends[0]["log"][-1]
    assert ends[2]["residuals"].keys() == ends[0]["residuals"].keys()


def test_a_stopped_rank_finds_that_it_is_out_and_joins_again():
    with Crew(end_size=3, end_epoch=2, timeout_s=3.0, **STREAMING) as crew:
        for number in range(3):
            crew.start(number, fault="stop" if number == 0 else None, at=6)
        crew.report(0, "fault")
        while crew.report(1, "epoch")[1] != 2:
            pass
        crew.signal(0, signal.SIGCONT)
        ends = [crew.report(place, "end") for place in range(3)]
    same(ends)
    assert [entry[1] for entry in ends[0]["log"]] == [3, 3]


def test_the_last_rank_goes_on_alone_after_two_deaths():
    with Crew(end_size=1, **STREAMING) as crew:
        for number in range(3):
            crew.start(number, fault="kill" if number else None, at=5 + number)
        end = crew.report(0, "end")
    assert end["log"][-1][1] == 1
    assert end["steps"] >= 16


@pytest.mark.long
@pytest.mark.thorough
def test_the_benchmark_keeps_the_ranks_equal_through_faults():
    """Of any kind, at random moments; a rank may lose its place, but never fails and never differs."""
    root = Path(__file__).parents[2]
    words = ["--ranks", "4", "--minutes", "0.3", "--fault-every-s", "4", "--stops", "0.2", "--timeout-s", "5"]
    script = [sys.executable, str(root / "benchmarks/elastic.py"), *words, "--step-ms", "20", "--sync-every", "4"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert "ranks that ended with an error: 0" in done.stdout
    assert "the 4 ranks at the end hold the same parameters: True" in done.stdout


# -- ranks as threads ------------------------------------------------------------------------------------------------


@pytest.fixture
def store():
    """One that no rank hosts, and its address."""
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{made.port}"
    del made


class Probe(LocalSGD):
    """Keeps what every average took and gave."""

    def _settle(self, transfer, *, may_postpone=False):
        sent, names = self._sent[transfer], transfer.fragment.names
        before = _flat(sent.residuals, transfer)
        if not super()._settle(transfer, may_postpone=may_postpone):
            return False
        after = _flat(self.hook.kept_of(names)[0], transfer)
        self.seen.append((self.hook.size, sent.delta + before, transfer.mean.clone(), after))
        return True


def _flat(residuals, transfer):
    numels = {segment.name: segment.numel for segment in transfer.fragment.segments}
    return torch.cat([residuals.get(name, torch.zeros(numels[name])) for name in transfer.fragment.names])


def test_no_residual_is_lost_or_counted_twice_when_an_average_is_repeated(store):
    """Law 4 over the ranks that are left: size * mean + residuals after == deltas + residuals before."""

    def run(rank):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shrink = Shrink(store, ranks=3, timeout_s=30)
        rounds = Probe(model, optimizer, sync_every=2, fragments=2, delay=1, exchange=SPEC, on_failure=shrink)
        rounds.seen = []
        with contextlib.suppress(ZeroDivisionError), rounds:
            train(model, optimizer, rank.rank, range(6))
            if rank.rank == 2:
                raise ZeroDivisionError
            train(model, optimizer, rank.rank, range(6, 13))
        return rounds.seen

    seen = thread_ranks(3, run, timeout_s=300)
    sizes = [size for size, *_ in seen[0]]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {2, 3}
    for turn, (size, _, mean, _) in enumerate(seen[0]):
        there = [seen[rank][turn] for rank in range(size)]
        came = torch.stack([entry[1] for entry in there]).sum(0)
        kept = torch.stack([entry[3] for entry in there]).sum(0)
        torch.testing.assert_close(size * mean + kept, came, rtol=1e-4, atol=1e-5)
        assert kept.any()


def test_an_average_that_has_failed_is_applied_when_the_next_one_is_sent(store):
    """And every step of the ranks that are left counts once. Rank 2 goes after 6 steps; parameters are sent after 8."""

    def run(rank):
        model, sizes = Net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shrink = Shrink(store, ranks=3, timeout_s=30)
        rounds = LocalSGD(model, optimizer, sync_every=4, delay=1, on_failure=shrink)
        with contextlib.suppress(ZeroDivisionError), rounds:
            for step in range(12):
                train(model, optimizer, rank.rank, [step])
                sizes.append((rounds.steps, len(rounds.transfers), any(one.postponed for one in rounds.transfers)))
                if rank.rank == 2 and step == 5:
                    raise ZeroDivisionError
        return values(model), sizes

    results = thread_ranks(3, run, timeout_s=200)
    for end, seen in results[:2]:
        assert [under_way for _, under_way, _ in seen[7:]] == [1, 1, 1, 1, 1]
        assert [postponed for _, _, postponed in seen[7:]] == [False, True, True, True, False]
        torch.testing.assert_close(end, _postponed(), rtol=1e-5, atol=1e-6)


def _postponed():
    """That training in one thread: sent at 4, 8 and 12, applied at 5, at 12 instead of 9, and at the end."""
    nets = [Net() for _ in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    agreed, sent = values(nets[0]), []
    for step in range(1, 13):
        there = 3 if step <= 6 else 2
        for number in range(there):
            train(nets[number], optimizers[number], number, [step - 1])
        if step in (5, 12):
            agreed = _applied(agreed, sent, nets[:there] if step == 5 else nets[:2])
        if step in (4, 8, 12):
            sent = [values(net) for net in nets[: 3 if step == 4 else 2]]
    return _applied(agreed, sent, nets[:2])


def _applied(agreed, sent, nets):
    new = agreed - torch.stack([agreed - value for value in sent]).mean(0)
    for net, value in zip(nets, sent, strict=True):
        torch.nn.utils.vector_to_parameters(new + values(net) - value, net.parameters())
    return new


def test_a_call_that_is_left_behind_does_not_hold_up_the_next_group(store):
    host, port = store.split(":")
    outside = OutsideStore(host, int(port), "0", 100.0)
    first, second = outside.for_group(), outside.for_group()
    waiting = threading.Thread(target=lambda: first.get("something that comes late"), daemon=True)
    waiting.start()
    second.set("something else", "1")
    assert second.get("something else") == b"1"
    assert outside.find("something else") == "1"
    assert waiting.is_alive()
    second.set("something that comes late", "1")
    waiting.join()


def test_a_checkpoint_of_all_ranks_continues_on_another_number(store):
    def run(job, size, states, rank):
        model = Net(seed=rank.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shrink = Shrink(store, ranks=size, job=job)
        rounds = DiLoCo(model, optimizer, sync_every=2, exchange=SPEC, on_failure=shrink)
        if states:
            rounds.load_state_dict(states)
        with rounds:
            begin = {name: value.clone() for name, value in rounds.named_globals()}
            total = rounds.state_dict(merged=True)["exchange"]["residuals"]
            train(model, optimizer, rank.rank, range(4))
            rounds.sync()
            return begin, total, rounds.steps, rounds.state_dict(merged=True)

    first = thread_ranks(2, lambda rank: run("first", 2, None, rank), timeout_s=300)
    saved = first[0][3]
    assert saved["exchange"]["residuals"]
    for begin, total, steps, _ in thread_ranks(3, lambda rank: run("second", 3, saved, rank), timeout_s=300):
        assert steps == 8
        torch.testing.assert_close(begin, saved["values"], rtol=0, atol=0)
        torch.testing.assert_close(total, saved["exchange"]["residuals"], rtol=1e-6, atol=1e-7)


def test_a_rank_that_trains_something_else_is_refused_and_the_others_do_not_notice(store):
    joined, refused = threading.Event(), threading.Event()

    def run(rank):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if rank.rank == 1:
            joined.wait(100)
            with pytest.raises(RegisterError, match=r"train the same; this rank asks for LocalSGD.sync_every=3"):
                LocalSGD(model, optimizer, sync_every=3, on_failure=Shrink(store)).__enter__()
            refused.set()
            return 0
        with LocalSGD(model, optimizer, sync_every=2, on_failure=Shrink(store)) as rounds:
            joined.set()
            refused.wait(100)
            train(model, optimizer, 0, range(4))
            return rounds.members.epoch

    assert thread_ranks(2, run, timeout_s=300)[0] == 1


def test_a_training_that_has_ended_is_not_joined(store):
    for number in range(2):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ends = pytest.raises(RegisterError, match="has ended at step 3") if number else contextlib.nullcontext()
        with ends, LocalSGD(model, optimizer, sync_every=2, on_failure=Shrink(store)):
            train(model, optimizer, 0, range(3))


def test_a_late_decision_or_record_changes_nothing(store):
    """What a rank does that was stopped at the worst moment: after it was outvoted."""

    def run(rank):
        members = Members(Shrink(store, ranks=2, timeout_s=100), "text")
        members.join(0)
        stopped = members.rank == 1
        assert members.commit_epoch(True) == GO
        if not stopped:
            assert members.commit(False, "a") == FAILED
            members._begin(2, [members._me], admit=False)
            decided.set()
        decided.wait(100)
        if stopped:
            assert members.commit(True, "a") == FAILED
            members._begin(2, [members._me], admit=False)
        stays = members.vote(admit=False)
        members.leave()
        return stays, members.size

    decided = threading.Event()
    assert sorted(thread_ranks(2, run, timeout_s=300)) == [(False, 2), (True, 1)]


# -- input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_failure", "error", "says"),
    [
        ("shrnk", SpecError, "must be 'raise', 'shrink' or"),
        ("shrink", RegisterError, "start one with 'gradwire store', and set GRADWIRE_STORE"),
        (Shrink("nowhere"), RegisterError, "as host:port, got 'nowhere'"),
    ],
)
def test_bad_settings_are_refused(on_failure, error, says):
    model = Net()
    with pytest.raises(error, match=says):
        LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2, on_failure=on_failure)


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"timeout_s": 0}, {"join_timeout_s": float("nan")}])
def test_bad_numbers_are_refused(wrong):
    with pytest.raises(SpecError, match=f"{next(iter(wrong))} must be"):
        Shrink("localhost:1", **wrong)


def test_a_rank_that_cannot_reach_the_store_says_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    model = Net()
    with pytest.raises(RegisterError, match=rf"no store at 127.0.0.1:{port} .*start one with 'gradwire store --port"):
        LocalSGD(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            sync_every=2,
            on_failure=Shrink(f"127.0.0.1:{port}", timeout_s=1),
        )


def test_a_store_that_stops_answering_ends_the_training_in_time():
    with Crew(end_size=1, ranks=1) as crew:
        hosted = crew.context.Pipe()
        host = crew.context.Process(target=_host, args=(hosted[1],), daemon=True)
        host.start()
        crew.hosts.append(host)
        crew.start(0, store=f"127.0.0.1:{hosted[0].recv()}", timeout_s=2.0)
        crew.report(0, "epoch")
        os.kill(host.pid, signal.SIGSTOP)
        with pytest.raises(AssertionError, match=r"ExchangeError: the store at 127.0.0.1:.* does not answer"):
            crew.report(0, "end")


def _host(pipe):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


def test_a_state_survives_the_handover():
    state = {"a": [1, 2.5, None, True, ("x", float("inf"))], 3: {"t": torch.arange(6.0).view(2, 3).t()}}
    state |= {"b": torch.tensor([-0.0, float("nan")]), "c": torch.tensor(2), "z": torch.empty(0, dtype=torch.bfloat16)}
    got = unpacked(*packed(state))
    assert got["a"] == state["a"]
    torch.testing.assert_close(got[3]["t"], state[3]["t"], rtol=0, atol=0)
    for name in "bcz":
        assert got[name].dtype == state[name].dtype
        torch.testing.assert_close(got[name], state[name], rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(got["b"])[0]
