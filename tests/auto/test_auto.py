"""Auto, on a clock of the test's own: what it picks, that all ranks pick the same, and when it measures again."""

import pytest
import torch

from gradwire.auto.pilot import IDLE, MOVED, TURN_STEPS, WARM_STEPS, WATCH, Pilot
from gradwire.auto.pilot import _pilots as pilots
from gradwire.auto.settings import Auto, auto
from gradwire.auto.trial import LEAST_ROUNDS, MOST_ROUNDS
from gradwire.errors import SpecError
from gradwire.exchanges.bucket import Bucket, make_bucket, segments_of
from gradwire.testing import thread_ranks
from gradwire.testing.contracts import gaussian

NUMEL = 4096


@pytest.fixture(autouse=True)
def _alone():
    """Pilots of the tests before may not have been collected yet."""
    pilots.clear()


class Clock:
    """Time passes when the test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def drive(size, settings, cost_s, steps):
    """`cost_s(rank, spec, step)` seconds for each step; per rank: the hook's spec at every step, and the reason."""

    def main(rank):
        clock, hook = Clock(), rank.hook("exact")
        hook.pilot = Pilot(hook, settings, clock)
        specs, exact = [], True
        for step in range(steps):
            grad = gaussian(NUMEL, seed=10 * step + rank.rank).view(64, 64)
            bucket = make_bucket([grad])
            hook.pilot.on_step()
            hook.begin(bucket)
            hook.pilot.on_bucket(bucket)
            hook.mean(bucket).wait()
            specs.append(str(hook.exchange))
            mean = sum(gaussian(NUMEL, seed=10 * step + other) for other in range(size)) / size
            error = float((bucket.flat - mean).norm() / mean.norm())
            exact &= error <= settings.max_error * 1.5 or bool(settings.trusted)
            clock.now += cost_s(rank.rank, specs[-1], step)
        return specs, hook.stats().reason, exact

    outcomes = thread_ranks(size, main, timeout_s=300)
    assert all(specs == outcomes[0][0] for specs, _, _ in outcomes)
    assert all(exact for _, _, exact in outcomes)
    return outcomes[0][0], outcomes[0][1]


def trial_steps(candidates):
    return WARM_STEPS + 2 + (1 + LEAST_ROUNDS * TURN_STEPS) * candidates


def costs(**seconds):
    return lambda rank, spec, step: seconds[spec] * (1.0 + 0.01 * rank)


ALL = ("exact", "bf16", "int8")


def test_picks_the_fastest_candidate():
    specs, reason = drive(2, Auto(hooks=ALL), costs(exact=0.3, bf16=0.18, int8=0.15), trial_steps(3))
    assert specs[: WARM_STEPS + 1] == ["exact"] * (WARM_STEPS + 1)
    assert set(specs) == {"exact", "bf16", "int8"}
    assert specs[-1] == "int8"
    assert "exact 303" in reason
    assert "bf16 182" in reason
    assert reason.startswith("int8: error 0.0")


def test_keeps_exact_when_no_candidate_is_faster():
    specs, reason = drive(2, Auto(hooks=ALL), costs(exact=0.100, bf16=0.098, int8=0.12), trial_steps(3))
    assert specs[-1] == "exact"
    assert "compression does not pay here" in reason


def test_candidates_alternate_step_by_step():
    specs, _ = drive(2, Auto(hooks=ALL), costs(exact=0.1, bf16=0.1, int8=0.1), trial_steps(3))
    turns = [specs[at : at + 3] for at in range(WARM_STEPS + 1, WARM_STEPS + 1 + 3 * TURN_STEPS, 3)]
    assert all(sorted(turn) == ["bf16", "exact", "int8"] for turn in turns)
    assert len(set(map(tuple, turns))) > 1


@pytest.mark.parametrize("period", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("phase", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_periodic_work_of_the_script_does_not_bias_the_choice(period, phase):
    """An optimizer's step after some backward passes, say."""
    cost = lambda rank, spec, step: {"exact": 0.1, "bf16": 0.12, "int8": 0.13}[spec] + 0.04 * (step % period == phase)  # noqa: E731
    specs, _ = drive(2, Auto(hooks=ALL), cost, WARM_STEPS + 2 + 3 * (1 + MOST_ROUNDS * TURN_STEPS))
    assert specs[-1] == "exact"


def test_slow_candidate_is_dropped_after_one_round():
    specs, reason = drive(2, Auto(hooks=ALL), costs(exact=0.5, bf16=0.151, int8=0.15), trial_steps(3))
    first_round = 3 * (1 + TURN_STEPS)
    assert specs[WARM_STEPS + 1 :].count("exact") == 1 + TURN_STEPS
    assert "exact" not in specs[WARM_STEPS + 1 + first_round :]
    assert specs.count("int8") == 1 + LEAST_ROUNDS * TURN_STEPS
    assert "exact 505" in reason


def test_clear_winner_ends_the_trial():
    specs, _ = drive(2, Auto(hooks=ALL), costs(exact=0.5, bf16=0.3, int8=0.1), trial_steps(3))
    assert set(specs[WARM_STEPS + 1 + 3 * (1 + TURN_STEPS) :]) == {"int8"}


def test_outliers_are_ignored():
    slow = lambda rank, spec, step: {"exact": 0.3, "bf16": 0.2, "int8": 0.1}[spec] + 5 * (step % 9 == 0)  # noqa: E731
    specs, _ = drive(2, Auto(hooks=ALL), slow, WARM_STEPS + 2 + 3 * (1 + MOST_ROUNDS * TURN_STEPS))
    assert specs[-1] == "int8"


def test_first_step_of_each_candidate_is_ignored():
    """They touch new memory."""
    seen = {0: set(), 1: set()}

    def cost(rank, spec, step):
        new = step > WARM_STEPS and spec not in seen[rank]
        seen[rank] |= {spec} if new else set()
        return 0.01 if new else {"exact": 0.3, "bf16": 0.2, "int8": 0.1}[spec]

    specs, reason = drive(2, Auto(hooks=ALL), cost, trial_steps(3))
    assert specs[-1] == "int8"
    assert "exact 300" in reason


def test_step_that_applies_the_residual_of_another_is_ignored():
    """The step after one with feedback costs 0.2 s more: exact would look slow."""
    fed, last = "bf16:feedback=true", {0: "", 1: ""}

    def cost(rank, spec, step):
        paying = last[rank] == fed and spec != fed
        last[rank] = spec
        return {"exact": 0.1, "int8": 0.12, fed: 0.15}[spec] + 0.2 * paying

    specs, reason = drive(2, Auto(hooks=("exact", fed, "int8")), cost, 2 * trial_steps(3))
    assert specs[-1] == "exact"
    assert "exact 100, bf16:feedback=true 150, int8 120" in reason


def test_most_exact_of_equally_fast_candidates_wins():
    specs, _ = drive(2, Auto(hooks=ALL), costs(exact=0.3, bf16=0.151, int8=0.15), trial_steps(3))
    assert specs[-1] == "bf16"


def test_candidate_above_max_error_is_left_out():
    settings = Auto(hooks=("exact", "bf16", "int4:exempt=none"), max_error=0.005)
    slow = lambda rank, spec, step: {"exact": 0.3, "bf16": 0.2}[spec]  # noqa: E731 - int4 would be a KeyError
    specs, reason = drive(2, settings, slow, trial_steps(2))
    assert specs[-1] == "bf16"
    assert "left out for their error: int4:exempt=none 0." in reason


def test_a_trusted_candidate_may_have_any_error():
    settings = auto("auto(hooks=[bf16], trusted=[int4(exempt=none)], max_error=0.005)")
    assert settings.specs == ["exact", "bf16", "int4:exempt=none"]
    specs, reason = drive(2, settings, costs(**{"exact": 0.3, "bf16": 0.2, "int4:exempt=none": 0.1}), trial_steps(3))
    assert specs[-1] == "int4:exempt=none"
    assert " is trusted; ms per step" in reason


def test_no_candidate_within_max_error():
    specs, reason = drive(2, Auto(hooks=ALL, max_error=1e-9), costs(exact=0.3), trial_steps(1))
    assert set(specs) == {"exact"}
    assert "no other candidate is within max_error=1e-09" in reason


def test_slowest_rank_decides():
    """To rank 0 int8 looks best; rank 2 has a slow processor."""
    cost = {0: {"exact": 0.2, "int8": 0.1}, 1: {"exact": 0.2, "int8": 0.1}, 2: {"exact": 0.2, "int8": 0.3}}
    specs, _ = drive(3, Auto(hooks=("exact", "int8")), lambda rank, spec, step: cost[rank][spec], trial_steps(2))
    assert specs[-1] == "exact"


def test_changed_link_starts_a_new_trial():
    first = trial_steps(2)

    def cost(rank, spec, step):
        slow = step > first + 5
        return {"exact": 0.3 if slow else 0.1, "int8": 0.12}[spec]

    specs, _ = drive(2, Auto(hooks=("exact", "int8")), cost, first + 3 * WATCH + trial_steps(2))
    assert specs[first - 1] == "exact"
    assert specs[-1] == "int8"


def test_small_change_starts_no_trial():
    first = trial_steps(2)
    wobble = lambda rank, spec, step: (0.1 if spec == "exact" else 0.2) * (1 + (MOVED - 1.1) * (step % 2))  # noqa: E731
    specs, _ = drive(2, Auto(hooks=("exact", "int8")), wobble, first + 3 * WATCH)
    assert set(specs[first:]) == {"exact"}


def test_keeps_its_choice_for_a_small_gain():
    first = trial_steps(2)

    def cost(rank, spec, step):
        return {"exact": 0.105, "int8": 0.1}[spec] if step < first else {"exact": 0.104, "int8": 0.108}[spec]

    specs, _ = drive(2, Auto(hooks=("exact", "int8"), recheck=WATCH), cost, first + 2 * WATCH + trial_steps(2))
    assert specs[first - 1] == "int8"
    assert "exact" in specs[first:]
    assert specs[-1] == "int8"


def test_switch_ends_auto():
    def main(rank):
        hook = rank.hook("exact")
        hook.pilot = Pilot(hook, Auto())
        hook.switch("bf16")
        return hook.pilot, hook.stats().reason

    assert thread_ranks(2, main) == [(None, "")] * 2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("auto:max_error=0", "max_error must be above 0"),
        ("auto:max_error=nan", "max_error must be above 0"),
        ("auto:recheck=0", "recheck must be at least 1"),
        ("auto(hooks=[exact, noop])", "noop does not average"),
        ("auto:hooks=int9", "unknown hook 'int9'"),
        ("auto:hook=int8", "unknown option 'hook'"),
    ],
)
def test_bad_options(spec, said):
    with pytest.raises(SpecError, match=said):
        auto(spec)


def test_candidates_with_options():
    made = auto("auto(hooks=[int8, int4(block=32, exempt=none)])")
    assert made.specs == ["exact", "int8", "int4:block=32,exempt=none"]
    assert auto(str(made)) == made
    assert auto("int8") is None


def test_model_with_only_sparse_gradients_stays_exact():
    def main(rank):
        hook = rank.hook("exact")
        hook.pilot = Pilot(hook, Auto(hooks=ALL))
        grad = torch.sparse_coo_tensor(torch.tensor([[rank.rank]]), torch.ones(1, 4), (8, 4), check_invariants=True)
        for _ in range(WARM_STEPS + 4):
            bucket = Bucket(0, grad.clone(), segments_of([torch.zeros(8, 4)], ["table"]), is_last=True)
            hook.pilot.on_step()
            hook.begin(bucket)
            hook.pilot.on_bucket(bucket)
            hook.mean(bucket).wait()
        return hook.stats().reason

    assert "all gradients are sparse" in thread_ranks(2, main)[0]


def two_models(rank, second_steps, steps=60):
    """Hooks of two models that train in turn, the second one only so many steps; what each has used."""
    hooks, specs, clock = [rank.hook("exact") for _ in range(2)], ([], []), Clock()
    for hook in hooks:
        hook.pilot = Pilot(hook, Auto(hooks=ALL), clock)
    for step in range(steps):
        for at, hook in enumerate(hooks):
            if at == 0 and step >= second_steps:  # the one that is first on trial
                continue
            bucket = make_bucket([gaussian(NUMEL, seed=10 * step + rank.rank).view(64, 64)])
            hook.pilot.on_step()
            hook.begin(bucket)
            hook.pilot.on_bucket(bucket)
            hook.mean(bucket).wait()
            specs[at].append(str(hook.exchange))
            clock.now += 0.1 if specs[at][-1] == "exact" else 0.105
    return specs


def test_two_models_have_trials_one_after_the_other():
    """Each one's step holds the other's too: at the same time both would find fast what makes one of them fast."""
    for first, second in thread_ranks(2, lambda rank: two_models(rank, 60, 60)):
        assert set(first[WARM_STEPS + 1 :]) == {"exact", "bf16", "int8"}
        assert set(second) == {"exact"}


def test_model_that_stopped_training_does_not_block_others():
    for first, second in thread_ranks(2, lambda rank: two_models(rank, WARM_STEPS + 6, 2 * IDLE)):
        assert set(first[WARM_STEPS + 1 :]) == {"exact", "bf16", "int8"}
        assert set(second) == {"exact", "bf16", "int8"}


@pytest.mark.parametrize("first", [float("inf"), float("nan"), 0.0])
def test_steps_without_information_on_the_error_are_skipped(first):
    """AMP begins with a loss scale at which gradients overflow, and skips such steps."""

    def main(rank):
        hook = rank.hook("exact")
        hook.pilot = Pilot(hook, Auto(hooks=ALL))
        for step in range(WARM_STEPS + 8):
            grad = gaussian(NUMEL, seed=10 * step + rank.rank).view(64, 64)
            bucket = make_bucket([grad if step > WARM_STEPS + 3 else torch.full_like(grad, first)])
            hook.pilot.on_step()
            hook.begin(bucket)
            hook.pilot.on_bucket(bucket)
            hook.mean(bucket).wait()
        return hook.pilot.reason, hook.pilot._errors

    for reason, errors in thread_ranks(2, main):
        assert reason == "measuring"
        assert 0 < errors["bf16"] < errors["int8"] < 0.02


def test_warmup_does_not_hide_the_error():
    def main(rank):
        hook = rank.hook("powersgd:rank=1,warmup=10")
        bucket = make_bucket([gaussian(NUMEL, seed=rank.rank).view(64, 64)])
        exact = sum(gaussian(NUMEL, seed=other) for other in range(2)) / 2
        hook.try_out(bucket)
        return float((bucket.flat - exact).norm() / exact.norm())

    assert min(thread_ranks(2, main)) > 0.1
