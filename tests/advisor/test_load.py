"""The load that a probe sets its collectives beside."""

import threading
import time

import torch

from gradwire.tools.measure.load import Load


def test_what_others_compute_is_counted_and_the_load_itself_is_not():
    load = Load().calibrate()
    spent = []

    def act():
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
        spent.append(time.thread_time() - began)

    idle_s = load.taken_by(lambda: time.sleep(0.2), 1)
    busy_s = load.taken_by(act, 4)
    assert busy_s > 0.5 * sum(spent)
    assert busy_s > idle_s


def test_it_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    Load().calibrate().taken_by(lambda: None, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_computes_only_while_it_is_asked_to():
    load = Load().calibrate()
    load.taken_by(lambda: load.taken_by(lambda: None, 1), 1)  # as ranks that are threads do
    assert "gradwire-load" not in {thread.name for thread in threading.enumerate()}
