"""The compute of a step, on a hook that is told of its buckets by hand."""

import time

import pytest
import torch

from gradwire.errors import SpecError
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import thread_ranks
from gradwire.tools.measure.compute import measure_compute


class Loss:
    """Stands for a graph: its backward hands over two buckets."""

    def __init__(self, hook):
        self.hook = hook

    def backward(self):
        for index in range(2):
            time.sleep(0.01)
            self.hook.mean(make_bucket([torch.ones(8)], index=index)).wait()
        time.sleep(0.005)


def _measure(rank):
    hook = rank.hook("noop")
    seen = []
    hook.after_mean = seen.append

    def forward():
        time.sleep(0.02)
        return Loss(hook)

    found = measure_compute(hook, forward, lambda: time.sleep(0.003), steps=3, cores=1)
    assert hook.after_mean == seen.append
    assert seen == []
    return found


def test_each_part_of_a_step():
    for found in thread_ranks(2, _measure):
        assert found.forward_s >= 0.02
        assert found.after_s >= 0.003
        assert len(found.ready_s) == 2
        assert found.ready_s[0] >= 0.01
        assert found.ready_s[1] >= 0.02
        assert found.backward_s >= 0.025
        assert found.step_s >= 0.048
        assert found.threads == 1


def test_only_without_communication():
    with pytest.raises(SpecError, match="measured under the hook 'noop', this one is bf16"):
        thread_ranks(2, lambda rank: measure_compute(rank.hook("bf16"), lambda: None, cores=1))
