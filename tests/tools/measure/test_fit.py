"""The line through measured times."""

import math
import random

import pytest

from gradwire.errors import SpecError
from gradwire.tools.measure.fit import fit

SIZES = [1 << power for power in range(10, 24, 2)]


def test_a_line_is_found_exactly():
    found = fit(SIZES, [50e-6 + size / 125e6 for size in SIZES])
    assert found.alpha_s == pytest.approx(50e-6)
    assert found.bytes_per_s == pytest.approx(125e6)
    assert found.r_squared == pytest.approx(1.0)
    assert found.seconds(1e6) == pytest.approx(50e-6 + 1e6 / 125e6)


def test_noise_of_the_large_does_not_drown_the_small():
    noise = random.Random(0)
    times = [100e-6 + size / 12.5e6 for size in SIZES]
    noisy = [time + 0.003 * math.sqrt(times[0] * time) * noise.gauss(0, 1) for time in times]
    found = fit(SIZES, noisy)
    assert found.alpha_s == pytest.approx(100e-6, rel=0.1)  # the largest takes 13000 times as long
    assert found.bytes_per_s == pytest.approx(12.5e6, rel=0.01)
    assert 0.9 < found.r_squared < 1.0


def test_the_large_tell_the_bandwidth():
    """The small ones went through on what a link has to spare."""
    found = fit([1 << 10, 1 << 16, 1 << 20, 1 << 22], [1e-3, 1e-3, 1e-3 + (1 << 20) / 100e6, 1e-3 + (1 << 22) / 100e6])
    assert found.bytes_per_s == pytest.approx(100e6, rel=0.05)


def test_latency_is_never_negative():
    found = fit([1000, 2000, 4000], [1e-6, 4e-6, 16e-6])
    assert found.alpha_s == 0.0
    assert found.bytes_per_s > 0


def test_times_that_do_not_grow_are_latency():
    found = fit([1000, 2000, 4000], [3e-3, 2e-3, 1e-3])
    assert found.bytes_per_s == math.inf
    assert 1e-3 <= found.alpha_s <= 3e-3
    assert found.r_squared == pytest.approx(0.0)


@pytest.mark.parametrize(("sizes", "times"), [([], []), ([8, 8], [1.0, 1.0]), ([8, 9], [1.0]), ([8, 9], [1.0, 0.0])])
def test_too_little_to_fit(sizes, times):
    with pytest.raises(SpecError, match="a fit needs times above 0 for at least two sizes"):
        fit(sizes, times)
