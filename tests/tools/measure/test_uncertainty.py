"""How far a prediction may be off, from what it was made from."""

import math

import pytest

from gradwire.advisor import Link
from gradwire.tools.measure.uncertainty import MODEL_ERROR, Slower, uncertainty

LINK = Link.parse("1gbit,latency=1ms")


def of(wire_s, compute_s):
    """A step that sends for so long and computes for so long, one after the other."""
    alone = sum(LINK.cost_s("all_gather", 2, 1e6))
    return lambda wire, slower: wire_s * sum(wire.cost_s("all_gather", 2, 1e6)) / alone + compute_s * slower


def test_without_a_spread_it_is_the_error_of_the_model():
    assert uncertainty(of(1.0, 1.0), LINK, 0.0, 0.0) == pytest.approx(MODEL_ERROR)


@pytest.mark.parametrize(("wire_s", "compute_s"), [(1.0, 1.0), (3.0, 1.0), (0.0, 2.0)])
def test_each_input_counts_as_much_as_the_step_depends_on_it(wire_s, compute_s):
    step_s = wire_s + compute_s
    expected = math.hypot(MODEL_ERROR, 0.3 * wire_s / step_s, 0.1 * compute_s / step_s)
    assert uncertainty(of(wire_s, compute_s), LINK, 0.3, 0.1) == pytest.approx(expected)


def test_an_unknown_step_has_the_error_of_the_model():
    assert uncertainty(lambda wire, slower: 0.0, LINK, 0.5, 0.5) == MODEL_ERROR


def test_on_a_slower_wire_latency_and_bytes_take_longer():
    plain, slower = LINK.cost_s("all_reduce", 4, 1e6), Slower(LINK, 1.5).cost_s("all_reduce", 4, 1e6)
    assert slower == pytest.approx(tuple(1.5 * cost_s for cost_s in plain))
