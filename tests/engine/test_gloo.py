"""The shorter ways over gloo give what gloo's own collectives give."""

import threading

import pytest
import torch

from gradwire.engine.gloo import LARGE_BYTES, SMALL_BYTES, TorchGroup
from gradwire.engine.runner import CUT_OFF
from gradwire.testing import thread_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64)


def lane_of(rank):
    runner = rank.runner()
    runner.open(1)
    return runner, runner.lanes._lanes[0].group


@pytest.mark.parametrize("size", [2, 3, 5])
def test_gathers_and_sums_equal_the_backends(size):
    """Bit for bit: two values have one sum, and more go the backend's own way."""

    def run(rank):
        runner, ours = lane_of(rank)
        made = torch.Generator().manual_seed(rank.rank)
        for numel in (1, 7, 1024, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, LARGE_BYTES // 4 + 1):
            for dtype in DTYPES:
                mine = torch.randint(0, 100, (numel,), generator=made).to(dtype) / (3 if dtype.is_floating_point else 1)
                mine = mine.to(dtype)
                for issue in (gathered, summed):
                    assert torch.equal(issue(ours, mine), issue(TorchGroup(ours._group), mine)), (
                        issue.__name__,
                        numel,
                        dtype,
                    )
        runner.close()
        return True

    assert all(thread_ranks(size, run))


def gathered(group, mine):
    out = torch.empty(group.size() * mine.numel(), dtype=mine.dtype)
    group.all_gather(out, mine).wait()
    return out


def summed(group, mine):
    total = mine.clone()
    if mine.dtype == torch.bfloat16 and mine.numel() > 1024:  # the backend sums these slowly
        total = total[:1024].clone()
    group.all_reduce(total).wait()
    return total


@pytest.mark.parametrize("size", [2, 3])
def test_empty_and_sparse_tensors_use_the_backend(size):
    """Nothing to send, a sparse sum."""

    def run(rank):
        runner, ours = lane_of(rank)
        assert gathered(ours, torch.empty(0)).numel() == 0
        assert summed(ours, torch.empty(0)).numel() == 0
        sparse = torch.sparse_coo_tensor([[rank.rank]], [1.0], (size,)).coalesce()
        ours.all_reduce(sparse).wait()
        runner.close()
        return sparse.to_dense().tolist() == [1.0] * size

    assert all(thread_ranks(size, run))


@pytest.mark.parametrize("numel", [1024, LARGE_BYTES + 1])
def test_rank_that_leaves_ends_the_wait(numel):
    """Short messages and long ones."""

    def run(rank):
        runner, ours = lane_of(rank)
        if rank.rank == 1:
            del ours
            runner.lanes.break_(RuntimeError("gone"))
            return True
        with pytest.raises(RuntimeError):
            gathered(ours, torch.zeros(numel, dtype=torch.uint8))
        return True

    assert all(thread_ranks(2, run))


@pytest.mark.parametrize(("size", "numel"), [(2, 1024), (2, LARGE_BYTES + 1), (3, 1024)])
def test_rank_that_gives_up_ends_its_own_wait(size, numel):
    """For a rank that has not come to the collective, and does not come before this one has left it."""
    left = threading.Event()

    def run(rank):
        runner, ours = lane_of(rank)
        if rank.rank > 0:
            left.wait(30)
            with pytest.raises(RuntimeError):
                gathered(ours, torch.zeros(numel, dtype=torch.uint8))
            return ""
        work = ours.all_gather(torch.empty(size * numel, dtype=torch.uint8), torch.zeros(numel, dtype=torch.uint8))
        del ours
        runner.lanes.break_(RuntimeError("gone"))
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        left.set()
        return str(caught.value).lower()

    assert CUT_OFF in thread_ranks(size, run)[0]


def test_all_connections_are_closed_when_one_is_gone_already():
    left = threading.Event()

    def run(rank):
        _runner, ours = lane_of(rank)
        if rank.rank == 1:
            ours.shutdown()
        elif rank.rank == 2:
            left.wait(30)
        else:
            with pytest.raises(RuntimeError, match="gloo"):  # when the connection to rank 1 is known to be closed
                ours._group.recv([torch.empty(1)], 1, 1).wait()
            work = ours._group.recv([torch.empty(1)], 2, 1)
            ours.shutdown()
            with pytest.raises(RuntimeError, match="pair closure"):
                work.wait()
            left.set()

    thread_ranks(3, run)


def test_long_messages_keep_their_order():
    """Many under way at once, waited for from the last to the first."""

    def run(rank):
        runner, ours = lane_of(rank)
        sent = [torch.full((LARGE_BYTES + 1,), 10 * index + rank.rank, dtype=torch.uint8) for index in range(8)]
        outs = [torch.empty(2 * mine.numel(), dtype=torch.uint8) for mine in sent]
        works = [ours.all_gather(out, mine) for out, mine in zip(outs, sent, strict=True)]
        for work in reversed(works):
            work.wait()
        runner.close()
        return [out[:: LARGE_BYTES + 1].tolist() for out in outs] == [[10 * i, 10 * i + 1] for i in range(8)]

    assert all(thread_ranks(2, run))
