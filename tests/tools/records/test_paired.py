"""The statistics of `gradwire compare`, against tables, and on simulated comparisons whose true gap is known."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.tools.records.paired import (
    POWER,
    final,
    gap_of,
    seeds_needed,
    smoothed,
    t_cdf,
    t_quantile,
    visible_shift,
    window_of,
)

REPEATS = 4000


@pytest.mark.parametrize(
    ("df", "p", "value"),
    [(1, 0.975, 12.7062), (2, 0.975, 4.30265), (4, 0.975, 2.77645), (4, 0.05, -2.13185), (30, 0.995, 2.75000)],
)
def test_quantiles_are_those_of_the_tables(df, p, value):
    assert t_quantile(p, df) == pytest.approx(value, rel=1e-5)
    assert t_cdf(value, df) == pytest.approx(p, abs=1e-6)


def test_infinitely_many_degrees_of_freedom_are_the_normal_distribution():
    assert t_quantile(0.975, math.inf) == pytest.approx(1.959964, rel=1e-6)
    assert visible_shift(math.inf) == pytest.approx(1.959964 + 1.281552, rel=1e-5)
    assert visible_shift(400) == pytest.approx(visible_shift(math.inf), rel=0.01)


def simulated(seeds, gap, spread, chance):
    return gap_of({seed: chance.gauss(gap, spread) for seed in range(seeds)})


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_interval_holds_the_true_gap_at_its_stated_confidence(seeds):
    chance = random.Random(seeds)
    found = [simulated(seeds, 0.05, 0.02, chance) for _ in range(REPEATS)]
    held = [each.low <= 0.05 <= each.high for each in found]
    assert statistics.fmean(held) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize("seeds", [3, 5])
def test_a_gap_as_large_as_the_visible_one_is_found_nine_times_in_ten(seeds):
    spread = 0.02
    true_gap = visible_shift(seeds - 1) * spread / math.sqrt(seeds)
    chance = random.Random(seeds)
    found = [simulated(seeds, true_gap, spread, chance).low > 0 for _ in range(REPEATS)]
    assert statistics.fmean(found) == pytest.approx(POWER, abs=0.017)


def test_without_a_gap_harm_is_found_in_one_of_forty_comparisons():
    chance = random.Random(0)
    alarms = [simulated(5, 0.0, 0.02, chance).low > 0 for _ in range(REPEATS)]
    assert statistics.fmean(alarms) == pytest.approx(0.025, abs=0.009)


def test_equal_gaps_have_no_spread_and_one_seed_says_nothing():
    same = gap_of({0: 0.0, 1: 0.0, 2: 0.0})
    assert (same.mean, same.half_width, same.visible) == (0, 0, 0)
    assert gap_of({0: 0.3}).half_width == math.inf
    assert gap_of({0: 0.3}).visible == math.inf


def test_more_seeds_show_smaller_gaps():
    found = gap_of({0: 0.01, 1: -0.01, 2: 0.0})
    need = seeds_needed(found, 0.01)
    spread = statistics.stdev(found.by_seed.values())
    assert visible_shift(need - 1) * spread / math.sqrt(need) <= 0.01
    assert visible_shift(need - 2) * spread / math.sqrt(need - 1) > 0.01
    assert seeds_needed(found, 1e-9) is None


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40), st.integers(1, 50))
def test_smoothing_is_the_mean_of_the_last_values(losses, window):
    found = smoothed(losses, window)
    wanted = [statistics.fmean(losses[max(0, at + 1 - window) : at + 1]) for at in range(len(losses))]
    assert found == pytest.approx(wanted, abs=1e-9)
    assert found[-1] == pytest.approx(final(losses, window), abs=1e-9)


def test_the_end_is_the_last_tenth():
    assert [window_of(steps) for steps in (5, 50, 100, 300, 1500)] == [5, 10, 10, 30, 150]
