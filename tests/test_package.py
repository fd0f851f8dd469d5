"""Importing does nothing, the public names are there, and the test kit itself works."""

import subprocess
import sys

import pytest

import gradwire
from gradwire.errors import GradwireError, RegisterError, SpecError, StateError, VerifyError, unknown
from gradwire.testing import RankFailed, spawn_ranks, thread_ranks

IMPORT = """
import os, sys, threading, warnings, logging
import torch, torch.distributed, torch.nn.parallel
from torch.distributed import _functional_collectives
before = (threading.active_count(), list(warnings.filters), torch.get_num_threads(), list(logging.getLogger().handlers))
reads = []
class Watched(dict):
    def __getitem__(self, key): reads.append(key); return super().__getitem__(key)
    def get(self, key, default=None): reads.append(key); return super().get(key, default)
os.environ = Watched(os.environ)
import gradwire, gradwire.ddp_comm_hooks, gradwire.testing
after = (threading.active_count(), list(warnings.filters), torch.get_num_threads(), list(logging.getLogger().handlers))
assert before == after, (before, after)
assert not reads, reads
assert "numba" not in sys.modules
"""


def test_import_does_nothing():
    """No threads, environment reads, warning filters or compilers."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names():
    for name in gradwire.__all__:
        assert getattr(gradwire, name) is not None
    for error in (SpecError, RegisterError, VerifyError, StateError):
        assert issubclass(error, GradwireError)
    assert issubclass(SpecError, ValueError)


def test_unknown_says_what_exists_and_what_is_near():
    assert unknown("hook", "bf61", ["bf16", "exact"]) == (
        "unknown hook 'bf61'. Did you mean 'bf16'? Available: bf16, exact"
    )


def fails_on_one(rank, size):
    if rank == 1:
        raise ValueError("this rank has a problem")
    return rank


def dies_on_one(rank, size):
    if rank == 1:
        raise SystemExit(3)
    return rank * 10


def test_a_child_s_traceback_comes_back():
    with pytest.raises(RankFailed, match=r"(?s)rank 1:.*ValueError: this rank has a problem"):
        spawn_ranks(2, fails_on_one)


def test_thread_ranks_return_in_order_and_raise_the_first_error():
    assert thread_ranks(4, lambda rank: rank.rank * rank.size) == [0, 4, 8, 12]
    with pytest.raises(ZeroDivisionError):
        thread_ranks(2, lambda rank: 1 // rank.rank)
