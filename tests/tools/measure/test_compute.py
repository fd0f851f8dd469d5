"""The compute of a step, on a hook that gets its buckets by hand, by a clock that is moved by hand."""

import pytest
import torch

from gradwire.engine.observers import Observer
from gradwire.errors import SpecError
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import thread_ranks
from gradwire.tools.measure import compute
from gradwire.tools.measure.compute import measure_compute

from ..fake_time import FakeClock


class Loss:
    """Stands for a graph: its backward hands over two buckets."""

    def __init__(self, hook, clock):
        self.hook, self.clock = hook, clock

    def backward(self):
        for index in range(2):
            self.clock.sleep(0.01)
            self.hook.mean(make_bucket([torch.ones(8)], index=index)).wait()
        self.clock.sleep(0.005)


class Seen(Observer):
    seen = 0

    def after_mean(self, bucket):
        self.seen += 1


def _measure(rank, clock):
    hook = rank.hook("noop")
    hook.observers = [observer := Seen()]

    def forward():
        clock.sleep(0.02)
        return Loss(hook, clock)

    found = measure_compute(hook, forward, lambda: clock.sleep(0.003), steps=3, cores=1)
    assert hook.observers == [observer]
    assert observer.seen == 0
    return found


def test_each_part_of_a_step_is_measured(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(compute, "now", lambda device: clock())
    (found,) = thread_ranks(1, lambda rank: _measure(rank, clock))
    assert (found.forward_s, found.after_s) == pytest.approx((0.02, 0.003))
    assert found.ready_s == pytest.approx((0.01, 0.02))
    assert found.backward_s == pytest.approx(0.025)
    assert found.step_s == pytest.approx(0.048)
    assert found.threads == 1


def test_a_hook_that_communicates_is_refused():
    with pytest.raises(SpecError, match="measured under the hook 'noop', this one is bf16"):
        thread_ranks(2, lambda rank: measure_compute(rank.hook("bf16"), lambda: None, cores=1))
