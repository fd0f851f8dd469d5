"""Who a trial picks, and when it has seen enough."""

import itertools
import math
import random

import pytest

from gradwire.auto.trial import FAR, LEAST_ROUNDS, MOST_ROUNDS, VERY_FAR, Trial

ERRORS = {"exact": 0.0, "bf16": 0.001, "int8": 0.005}


def play(cost_s, *, survey=None):
    """`cost_s(spec, round)` gives the three steps of a round. The trial when it is over, and its rounds."""
    trial, count = Trial(ERRORS, survey=survey), 0
    while count == 0 or not trial.is_over:
        count += 1
        trial.add({spec: cost_s(spec, count) for spec in trial.left})
    return trial, count


def steady(**seconds):
    return lambda spec, count: [seconds[spec]] * 3


def test_few_rounds_suffice_without_noise():
    trial, rounds = play(steady(exact=0.12, bf16=0.11, int8=0.1))
    assert (trial.pick, rounds) == ("int8", LEAST_ROUNDS)


def test_most_exact_of_equally_fast_candidates_wins():
    trial, rounds = play(steady(exact=0.12, bf16=0.102, int8=0.1))
    assert (trial.pick, rounds) == ("bf16", LEAST_ROUNDS)


@pytest.mark.parametrize(("factor", "rounds"), [(FAR, 2), (VERY_FAR, 1)])
def test_slow_candidates_are_dropped_early(factor, rounds):
    trial, _ = play(steady(exact=0.1 * factor * 1.01, bf16=0.11, int8=0.1))
    all_rounds = 3 * LEAST_ROUNDS
    steps = {spec: len(times) for spec, times in trial.step_s.items()}
    assert steps == {"exact": 3 * rounds, "bf16": all_rounds, "int8": all_rounds}


def test_clear_winner_ends_the_trial_after_one_round():
    trial, rounds = play(steady(exact=0.5, bf16=0.3, int8=0.1))
    assert (trial.pick, rounds) == ("int8", 1)


def test_survey_keeps_all_candidates():
    trial, rounds = play(steady(exact=0.3, bf16=0.2, int8=0.1), survey=3)
    assert rounds == 3
    assert {len(times) for times in trial.step_s.values()} == {9}


@pytest.mark.parametrize("odd", [(9.0, 5.0), (0.001, 5.0)])
def test_outliers_are_ignored(odd):
    """Two that something disturbs, or one of those and one on a short last batch."""
    base = {"exact": 0.12, "bf16": 0.11, "int8": 0.1}
    assert play(lambda spec, count: [odd[0], base[spec], odd[1], base[spec]])[0].pick == "int8"


@pytest.mark.parametrize("phase", range(16))
def test_short_last_batch_of_an_epoch_does_not_bias_the_choice(phase):
    """Every 16th step takes a quarter of the time, for every candidate."""
    base, steps = {"exact": 0.1, "bf16": 0.12, "int8": 0.13}, itertools.count(phase)
    trial, _ = play(lambda spec, count: [base[spec] / (4 if next(steps) % 16 == 0 else 1) for _ in range(4)])
    assert trial.pick == "exact"


def test_slow_period_of_all_candidates_does_not_matter():
    """Rounds take from 1 to 3 times as long; the candidates differ by 6%."""
    base = {"exact": 0.112, "bf16": 0.106, "int8": 0.1}
    trial, rounds = play(lambda spec, count: [base[spec] * (1 + 2 * (count % 3 == 1))] * 3)
    assert (trial.pick, rounds) == ("int8", LEAST_ROUNDS)


def test_times_are_comparable_between_candidates():
    """The first round is slow, and exact is out after it: it does not look slower for that."""
    base = {"exact": 0.13, "bf16": 0.106, "int8": 0.1}
    trial, _ = play(lambda spec, count: [base[spec] * (2 if count == 1 else 1)] * 3)
    assert trial.times_s == pytest.approx(base)


@pytest.mark.parametrize("seed", range(20))
def test_noise_takes_more_rounds(seed):
    """Rounds that differ by a tenth: it goes on for longer, ends all the same, and never takes the slow one."""
    noise = random.Random(seed)
    base = {"exact": 0.12, "bf16": 0.104, "int8": 0.1}
    trial, rounds = play(lambda spec, count: [base[spec] * (1 + noise.uniform(0, 0.2)) for _ in range(3)])
    assert LEAST_ROUNDS <= rounds <= MOST_ROUNDS
    assert trial.pick in ("bf16", "int8")


def swing(of, seconds, by=1.1):
    """`of` takes so long on average, but its rounds swing by a tenth up and down; the others take 0.1 s."""
    return lambda spec, count: [seconds * (by if count % 2 else 1 / by) if spec == of else 0.1] * 3


def test_trial_ends_under_constant_noise():
    """int8 leads by 2%, but who could tell: it takes many rounds, and then the most exact."""
    trial, rounds = play(swing("int8", 0.098, by=1.2))
    assert (trial.pick, rounds) == ("exact", MOST_ROUNDS)


def test_lucky_leader_does_not_end_the_trial():
    """exact leads, but int8 swings so much that it may be faster by more than 3% as well: go on until that is known."""
    _, rounds = play(swing("int8", 0.1001))
    assert LEAST_ROUNDS < rounds < MOST_ROUNDS


@pytest.mark.parametrize("seed", range(20))
def test_small_gain_is_found_under_large_noise(seed):
    """8%, where steps differ by a tenth from each other, as on a machine that others use too."""
    noise = random.Random(seed)
    base = {"exact": 0.1, "bf16": 0.1, "int8": 0.092}

    def cost(spec, count):
        return [base[spec] * math.exp(noise.gauss(0, 0.1)) for _ in range(4)]

    assert play(cost)[0].pick == "int8"
