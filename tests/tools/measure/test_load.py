"""The load that a probe sets its collectives beside."""

import threading
import time

import pytest
import torch

from gradwire.tools.measure.load import Load

PIECE_S = 1e-3


class CountedLoad(Load):
    """Its work takes no time, and the CPU time is counted by hand."""

    def __init__(self):
        self.cpu_s, self._counting = 0.0, threading.Lock()
        super().__init__(cpu_time=lambda: self.cpu_s)

    def spend(self, seconds):
        with self._counting:
            self.cpu_s += seconds

    def _work(self):
        self.spend(PIECE_S)
        time.sleep(0)


def test_the_cpu_time_of_others_is_counted_and_that_of_the_load_is_not():
    load = CountedLoad().calibrate()
    assert load.taken_by(lambda: load.spend(0.5), 4) == pytest.approx(2.0, abs=2 * PIECE_S)
    assert load.taken_by(lambda: None, 4) == pytest.approx(0.0, abs=2 * PIECE_S)


def test_it_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    Load().calibrate().taken_by(lambda: None, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_computes_only_while_it_is_needed():
    load = Load().calibrate()
    load.taken_by(lambda: load.taken_by(lambda: None, 1), 1)  # as ranks that are threads do
    assert "gradwire-load" not in {thread.name for thread in threading.enumerate()}
