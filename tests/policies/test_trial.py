"""Who a trial picks, and when it has seen enough."""

import random

import pytest

from gradwire.policies.trial import FAR, LEAST_ROUNDS, MOST_ROUNDS, Trial

ERRORS = {"exact": 0.0, "bf16": 0.001, "int8": 0.005}


def play(cost_s, *, everyone=False):
    """`cost_s(spec, round)` gives the three steps of a turn. The trial when it is over, and its rounds."""
    trial, count = Trial(ERRORS, everyone=everyone), 0
    while count == 0 or not trial.is_over:
        count += 1
        trial.add({spec: cost_s(spec, count) for spec in trial.left})
    return trial, count


def steady(**seconds):
    return lambda spec, count: [seconds[spec]] * 3


def test_a_quiet_machine_needs_few_rounds():
    trial, rounds = play(steady(exact=0.12, bf16=0.11, int8=0.1))
    assert (trial.pick, rounds) == ("int8", LEAST_ROUNDS)


def test_the_most_exact_of_those_that_are_as_fast():
    trial, rounds = play(steady(exact=0.12, bf16=0.102, int8=0.1))
    assert (trial.pick, rounds) == ("bf16", LEAST_ROUNDS)


def test_who_is_far_behind_gets_one_turn():
    trial, _ = play(steady(exact=0.1 * FAR * 1.01, bf16=0.11, int8=0.1))
    assert {spec: len(times) for spec, times in trial.step_s.items()} == {"exact": 3, "bf16": 12, "int8": 12}


def test_one_that_beats_all_by_far_ends_it_at_once():
    trial, rounds = play(steady(exact=0.3, bf16=0.2, int8=0.1))
    assert (trial.pick, rounds) == ("int8", 1)


def test_nobody_drops_out_of_a_survey():
    trial, rounds = play(steady(exact=0.3, bf16=0.2, int8=0.1), everyone=True)
    assert rounds == LEAST_ROUNDS
    assert {len(times) for times in trial.step_s.values()} == {3 * LEAST_ROUNDS}


def test_only_the_fastest_step_of_a_turn_counts():
    disturbed = lambda spec, count: [9.0, {"exact": 0.12, "bf16": 0.11, "int8": 0.1}[spec], 5.0]  # noqa: E731
    assert play(disturbed)[0].pick == "int8"


def test_a_slow_minute_that_hits_all_does_not_matter():
    """Rounds take from 1 to 3 times as long; the candidates differ by 6%."""
    base = {"exact": 0.112, "bf16": 0.106, "int8": 0.1}
    trial, rounds = play(lambda spec, count: [base[spec] * (1 + 2 * (count % 3 == 1))] * 3)
    assert (trial.pick, rounds) == ("int8", LEAST_ROUNDS)


def test_times_are_as_if_all_had_taken_all_turns():
    """The first round is slow, and exact is out after it: it does not look slower for that."""
    base = {"exact": 0.13, "bf16": 0.106, "int8": 0.1}
    trial, _ = play(lambda spec, count: [base[spec] * (2 if count == 1 else 1)] * 3)
    assert trial.times_s == pytest.approx(base)


@pytest.mark.parametrize("seed", range(20))
def test_noise_costs_rounds(seed):
    """Turns that differ by a tenth: it goes on for longer, ends all the same, and never takes the slow one."""
    noise = random.Random(seed)
    base = {"exact": 0.12, "bf16": 0.104, "int8": 0.1}
    trial, rounds = play(lambda spec, count: [base[spec] * (1 + noise.uniform(0, 0.2)) for _ in range(3)])
    assert LEAST_ROUNDS <= rounds <= MOST_ROUNDS
    assert trial.pick in ("bf16", "int8")


def test_noise_without_end():
    """int8 leads by 2%, but its turns swing by a fifth: it takes all rounds, and then the most exact."""

    def swing(spec, count):
        return [0.098 * (1.1 if count % 2 else 1 / 1.1) if spec == "int8" else 0.1] * 3

    trial, rounds = play(swing)
    assert (trial.pick, rounds) == ("exact", MOST_ROUNDS)
