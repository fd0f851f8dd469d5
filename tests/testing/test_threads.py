"""Ranks as threads."""

import threading

import pytest
import torch

from gradwire.errors import SpecError
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import RankPool, check_codec, thread_ranks


def test_results_are_in_order():
    assert thread_ranks(4, lambda rank: rank.rank * rank.size) == [0, 4, 8, 12]


@pytest.mark.parametrize("size", [0, -1])
def test_no_ranks_are_refused(size):
    with pytest.raises(SpecError, match=f"at least 1, got {size}"):
        thread_ranks(size, lambda rank: rank.rank)
    with pytest.raises(SpecError, match=f"at least 1, got {size}"):
        RankPool(size)


def test_check_codec_takes_a_codec():
    with pytest.raises(SpecError, match=r"check_codec takes a gradwire\.Codec .*, got 'int8'"):
        check_codec("int8")


def test_error_of_the_lowest_rank_is_raised():
    with pytest.raises(ZeroDivisionError):
        thread_ranks(2, lambda rank: 1 // rank.rank)


def test_rank_that_returns_early_closes_nothing_yet():
    """The other one is still at work with the hook of both."""
    returned = threading.Event()

    def run(rank):
        hook = rank.hook("exact")
        if rank.rank == 0:
            returned.set()
            return hook
        assert returned.wait(20)
        other = make_bucket([torch.ones(3)])
        hook.begin(other)
        return hook, rank

    early, (late, _) = thread_ranks(2, run)
    assert early.closed
    assert late.closed


def test_rank_that_fails_ends_the_waiting_of_the_others():
    """Its hooks are closed at once, so that the collective of the other one fails long before its time limit."""
    texts = []

    def run(rank):
        hook = rank.hook("exact")
        if rank.rank == 1:
            raise LookupError("this rank has a problem")
        try:
            hook.mean(make_bucket([torch.ones(3)])).wait()
        except RuntimeError as error:
            texts.append(str(error).lower())
            raise

    with pytest.raises(RuntimeError):
        thread_ranks(2, run, timeout_s=300)
    assert len(texts) == 1
    assert "timed out" not in texts[0]
