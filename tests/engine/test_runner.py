"""The engine: order, errors, endings."""

import gc
import random
import threading
import time
from contextlib import suppress

import pytest
import torch

from gradwire.engine import stream
from gradwire.engine.hook import Hook
from gradwire.engine.lanes import Lane, has_ended
from gradwire.engine.stream import StreamRunner, inline_comm
from gradwire.errors import ExchangeError, RegisterError
from gradwire.exchanges import EXCHANGES, Exact, Exchange, exchange
from gradwire.exchanges.base import Levels
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import thread_ranks
from gradwire.testing.contracts import gaussian


def nothing(*_):
    pass


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gradwire-")]


def test_collectives_keep_their_order_whatever_the_threads_do():
    """Jobs of one to three collectives with random pauses: every job gets its own sums."""

    def run(rank):
        runner, sums = rank.runner(threads=4), {}
        runner.open(3)
        pauses = random.Random(rank.rank)

        def job(index):
            def work(comm):
                for k in range(1 + index % 3):
                    time.sleep(pauses.random() * 0.003)
                    value = torch.tensor([float(100 * index + k)])
                    sums[index, k] = float(comm.all_reduce_(value))

            return work

        futures = [runner.submit([job(index)], torch.empty(0), nothing) for index in range(40)]
        for future in futures:
            future.wait()
        runner.close()
        return sums

    for sums in thread_ranks(3, run):
        assert sums == {(i, k): 3.0 * (100 * i + k) for i in range(40) for k in range(1 + i % 3)}


def test_collectives_compute_what_they_promise():
    def run(rank):
        runner, got = rank.runner(), {}
        runner.open(2)
        rows = torch.arange(6.0).view(3, 2) + 10 * rank.rank
        runner.run(lambda comm: got.update(rows=comm.all_to_all(rows).clone(), own=comm.all_gather(rows[0]).clone()))
        runner.close()
        return got

    for rank, got in enumerate(thread_ranks(3, run)):
        assert got["rows"].tolist() == [[10 * r + 2 * rank, 10 * r + 2 * rank + 1] for r in range(3)]
        assert got["own"].tolist() == [[10 * r, 10 * r + 1] for r in range(3)]


class Broken(Exchange):
    """Raises on one rank at the third bucket."""

    lanes = 2

    def chunk_bytes(self, size):
        return 1 << 20

    def bound(self, size):
        return 1.0

    def mean_(self, bucket, comm, residual=None):
        if bucket.index == 3 and comm.rank == 1:
            raise KeyError("no such thing")
        comm.all_gather(comm.all_reduce_(bucket.flat))

    def __str__(self):
        return "broken"


@pytest.mark.parametrize("size", [2, 4])
def test_error_on_one_rank_reaches_all_ranks(size):
    def run(rank):
        hook, futures, errors = rank.hook(Broken()), [], []
        for index in range(6):
            with suppress(ExchangeError):  # the error may come out at the next bucket already
                futures.append(hook.mean(make_bucket([torch.ones(10)], index=index)))
        for future in futures:
            try:
                future.wait()
            except RuntimeError as error:
                errors.append(str(error))
        with pytest.raises(ExchangeError, match="earlier error"):
            hook.mean(make_bucket([torch.ones(10)]))
        return errors

    for rank, errors in enumerate(thread_ranks(size, run, timeout_s=300)):
        assert errors, rank
        assert "timed out" not in errors[-1].lower(), "the rank waited for its time limit"
        assert "KeyError: 'no such thing'" in errors[-1]
        assert rank == 1 or "rank 1" in errors[-1]


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4 << 20])  # sent at once, and by the lane's thread
def test_late_rank_learns_that_the_others_gave_up(chunk_bytes):
    given_up = threading.Event()
    exchange("int8").warm_up(torch.device("cpu"))  # the time limit below is for the ranks, not for the compiler

    def run(rank):
        hook, bucket = rank.hook("int8", chunk_bytes=chunk_bytes), make_bucket([torch.ones(4 << 20)])
        try:
            if rank.rank == 1:
                given_up.wait(30)
            with pytest.raises(RuntimeError) as caught:
                hook.mean(bucket).wait()
        finally:
            given_up.set()
        return str(caught.value)

    early, late = thread_ranks(2, run, timeout_s=3)
    assert "rank 1 did not come in time" in early
    assert "another rank failed (rank 0: rank 1 did not come in time" in late


class Counted(list):
    """Jobs that are counted after `submit` has seen that the runner works, and before they are queued."""

    def __init__(self, jobs, meanwhile):
        super().__init__(jobs)
        self._meanwhile = meanwhile

    def __len__(self):
        self._meanwhile()
        return super().__len__()


@pytest.mark.parametrize("ending", ["a job fails", "close"])
def test_no_job_waits_for_ever_if_its_runner_ends_while_it_is_submitted(ending):
    def run(rank):
        runner, due = rank.runner(), threading.Event()
        runner.open(1)

        def fail(comm):
            due.wait(30)
            raise KeyError("no such thing")

        def end():
            due.set()
            if ending == "close":
                runner.close()
            with suppress(RuntimeError):
                first.wait()

        first = runner.submit([fail if ending == "a job fails" else nothing], torch.empty(0))
        with pytest.raises(ExchangeError, match="no such thing" if ending == "a job fails" else "closed"):
            runner.submit(Counted([nothing], end), torch.empty(0)).wait()

    thread_ranks(1, run)


def future_failed(future):
    with suppress(RuntimeError):
        future.wait()
        return False
    return True


def test_rank_that_gives_up_gets_its_own_error():
    """And not that of the connections which it has closed."""
    given_up = threading.Event()

    def run(rank):
        hook = rank.hook("exact")
        if rank.rank == 1:
            given_up.wait(30)
        future = hook.mean(make_bucket([torch.ones(4)]))
        if rank.rank == 0:
            hook.runner.give_up(ValueError("my own mistake"))
            given_up.set()
        elif not future_failed(future):  # what it needs had arrived
            future = hook.mean(make_bucket([torch.ones(4)]))
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        return str(caught.value)

    own, other = thread_ranks(2, run)
    assert "ValueError: my own mistake" in own
    assert "another rank" not in own
    assert "another rank failed (rank 0: ValueError: my own mistake)" in other


class Greedy(Broken):
    """Issues more collectives than it declares."""

    def mean_(self, bucket, comm, residual=None):
        for _ in range(3):
            comm.all_reduce_(bucket.flat)


def test_more_collectives_than_declared_raise():
    def run(rank):
        with pytest.raises(RuntimeError, match=r"collective 3 but declares lanes=2"):
            rank.mean(Greedy(), [torch.ones(3)])

    thread_ranks(2, run)


def test_error_of_ranks_that_disagree_lists_their_specs():
    def run(rank):
        with pytest.raises(RegisterError, match="rank 0 'fp16', rank 1 'bf16'"):
            rank.hook("bf16" if rank.rank == 1 else "fp16")

    thread_ranks(2, run)


def test_switch_to_more_lanes_and_back():
    def run(rank):
        hook, means = rank.hook("exact"), []
        for spec in ("bf16:shots=two", "exact", "noop", "fp16"):
            hook.switch(spec)
            bucket = make_bucket([torch.full((10,), float(rank.rank))])
            means.append(float(hook.mean(bucket).wait()[0]))
        return means

    assert thread_ranks(3, run) == [[1.0, 1.0, float(rank), 1.0] for rank in range(3)]


def test_close_and_garbage_collection_end_the_threads():
    before = len(engine_threads())

    def run(rank):
        closed, forgotten = rank.hook("bf16"), rank.hook("fp16")
        for hook in (closed, forgotten):
            hook.mean(make_bucket([torch.ones(10)])).wait()
        closed.close()
        closed.close()
        with pytest.raises(ExchangeError, match="closed"):
            closed.mean(make_bucket([torch.ones(10)]))
        with pytest.raises(ExchangeError, match="closed"):
            closed.switch("exact")
        rank._hooks.clear()

    thread_ranks(2, run)
    gc.collect()
    assert len(engine_threads()) == before


def test_steady_state_allocates_no_memory():
    """Jobs get the same blocks again, and hand nothing of them out."""

    def run(rank):
        hook, places = rank.hook("bf16:shots=two", threads=1), set()
        for _ in range(6):
            hook.mean(make_bucket([gaussian(5000)])).wait()
            hook.run(lambda comm: places.add(comm.all_gather(torch.ones(3000)).data_ptr()))
        return len(places)

    assert max(thread_ranks(2, run)) <= 2


@pytest.mark.parametrize("spec", EXCHANGES)
def test_stream_runner_gives_the_same_bits(spec):
    """What accelerators use, inline on the CPU: one group, everything in order."""

    def run(rank):
        reference = rank.mean(spec, [gaussian(1000, seed=rank.rank)]).flat
        other = rank.runner()
        other.open(1)
        runner = StreamRunner(other.lanes._lanes[0].group._group, torch.device("cpu"))
        hook = Hook(exchange(spec), runner, rank=rank.rank, size=rank.size, device=torch.device("cpu"))
        bucket = make_bucket([gaussian(1000, seed=rank.rank)])
        hook.mean(bucket).wait()
        assert hook.stats().hook == spec
        hook.close()
        other.close()
        return torch.equal(bucket.flat, reference)

    assert all(thread_ranks(3, run))


def test_stream_runner_makes_the_groups_of_a_split_once(monkeypatch):
    """`auto` changes hooks at every step."""
    made = []
    monkeypatch.setattr(stream, "level_groups", lambda group, levels: made.append(levels) or ())
    runner, levels = StreamRunner(None, torch.device("cpu")), Levels(2, 1, 1)
    for wanted in (levels, None, levels, Levels(4, 1, 1)):
        runner.split(wanted)
    assert made == [levels, Levels(4, 1, 1)]


def test_inline_comm_counts_bytes():
    def run(rank):
        runner = rank.runner()
        runner.open(1)
        comm = inline_comm(runner.lanes._lanes[0].group._group)
        Exact().mean_(make_bucket([torch.ones(100)]), comm)
        runner.close()
        return comm.traffic.sent_bytes

    assert thread_ranks(2, run) == [400.0, 400.0]


@pytest.mark.parametrize(("spec", "formula"), [("exact", 4 * 2), ("bf16", 2 * 2), ("fp16:accumulate=wire", 2 * 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_stats_count_what_is_sent(spec, formula, size):
    def run(rank):
        hook = rank.hook(spec)
        for _ in range(3):
            for index in range(2):
                bucket = make_bucket([gaussian(8192)], index=index)
                hook.begin(bucket)
                hook.mean(bucket).wait()
        return hook.stats()

    for stats in thread_ranks(size, run):
        assert stats.sent_bytes == pytest.approx(2 * 8192 * formula * (size - 1) / size, rel=0.01)
        assert stats.received_bytes == stats.sent_bytes
        assert (stats.steps, stats.timed_steps, stats.buckets) == (3, 3, 2)
        assert stats.kernels == "numba"
        assert min(stats.encode_s, stats.wire_s, stats.decode_s, stats.wait_s) >= 0
        assert stats.wire_s > 0
        assert stats.as_dict()["hook"] == spec


def test_threads_start_when_jobs_need_them():
    def run(rank):
        runner, gate = rank.runner(threads=3), threading.Event()
        runner.open(1)
        for _ in range(5):
            runner.run(lambda comm: None)
        one_by_one = len(runner._threads)
        future = runner.submit([lambda comm: gate.wait(10)] * 5, torch.empty(0), counted=False)
        at_once = len(runner._threads)
        gate.set()
        future.wait()
        runner.run(lambda comm: comm.all_reduce_(torch.zeros(1)))  # the other rank has connected, too
        runner.close()
        return one_by_one, at_once

    assert thread_ranks(2, run) == [(1, 3)] * 2


class Forgotten:
    """Work that never ends, such as a collective whose message gloo has forgotten."""

    def wait(self, within):
        time.sleep(within.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


def test_a_collective_that_gloo_has_forgotten_ends_with_the_others():
    """gloo forgets a message that it is about to send when the other side closes the connection."""
    lane = Lane(group=None)
    caught = []

    def wait():
        try:
            lane.run(0, lambda group: Forgotten())
        except KeyError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    lane.wait_issued(0, 30.0)
    lane.break_(KeyError("no such thing"))
    thread.join(30.0)
    assert [str(error) for error in caught] == ["'no such thing'"]


def test_a_group_that_cannot_be_dropped_yet_keeps_nobody_waiting():
    free = threading.Event()

    class Busy:
        def shutdown(self):
            pass

        def __del__(self):
            free.wait(60.0)

    lane = Lane(Busy())
    dropping = lane.break_(KeyError("no such thing"))
    assert dropping.is_alive()
    free.set()
    dropping.join(30.0)
    assert not dropping.is_alive()


@pytest.mark.parametrize("completed", [False, True])
def test_work_that_has_not_ended_in_time_is_told_from_work_that_failed(completed):
    class Work:
        def wait(self, *within):
            raise RuntimeError("Operation timed out!" if within else "Connection closed by peer")

        def is_completed(self):
            return completed

    if not completed:
        assert not has_ended(Work(), 0.01)
        return
    with pytest.raises(RuntimeError, match="Connection closed"):
        has_ended(Work(), 0.01)
