"""What `gradwire compare` says about runs whose true gaps are known."""

import dataclasses
import json
import math

import pytest

from gradwire.tools.records.jsonl import RecordsError
from gradwire.tools.records.verdicts import FAILED, FINE, HURTS, SLIGHT, UNKNOWN, conclude, conclude_all

from .curves import CONDITIONS, curve, falling, runs


def verdict(curves, name="hook", **options):
    return next(row for row in conclude(curves, ["exact", name], **options).rows if row.name == name)


def test_harm_is_found_and_measured_by_the_spread_between_seeds():
    row = verdict(runs({"hook": (0.08, 0.004)}))
    assert row.verdict == HURTS
    assert row.gap.mean == pytest.approx(0.08, abs=0.01)
    assert row.sentence.startswith(f"hurts: {row.gap.mean:+.4f} +- ")
    assert row.sentence.endswith("x the spread between seeds")


def test_no_harm_is_said_with_what_would_have_been_seen():
    row = verdict(runs({"hook": (0.0, 0.003)}))
    assert row.verdict == FINE
    assert "would have been seen" in row.sentence
    assert 0 < row.gap.visible < 0.03


def test_a_small_but_certain_gap_is_called_small():
    assert verdict(runs({"hook": (0.004, 0.0005)})).verdict == SLIGHT


def test_runs_that_vary_too_much_do_not_tell():
    row = verdict(runs({"hook": (0.0, 0.05)}))
    assert row.verdict == UNKNOWN
    assert "use about" in row.sentence
    assert verdict(runs({"hook": (0.0, 0.05)}), tolerance=1.0).verdict == FINE


def test_one_seed_does_not_tell():
    assert verdict(runs({"hook": (0.01, 0.0)}, seeds=1)).sentence == (
        "cannot tell: one seed with a gap of +0.010 shows no spread; use --seeds 3 or more"
    )


def test_the_same_losses_are_no_harm_however_few_seeds_there_are():
    row = verdict(runs({"hook": (0.0, 0.0)}, seeds=2))
    assert (row.verdict, row.sentence) == (FINE, "no harm seen: the losses are the same")


def test_a_run_that_diverges_is_harm_even_if_others_do_not():
    curves = runs({"hook": (0.0, 0.003)})
    lost = [math.nan if at >= 50 else loss for at, loss in enumerate(falling(1))]
    curves = [curve("hook", 1, lost) if each.key == ("hook", 1) else each for each in curves]
    result = conclude(curves, ["exact", "hook"])
    assert result.rows[1].sentence == "hurts: the loss is not finite from step 51 on (1 of 5 seeds)"
    assert result.best.name == "exact"
    assert json.dumps(result.as_dict())


def test_one_bad_step_is_no_divergence():
    losses = falling(0)
    losses[20] = math.inf
    assert curve("hook", 0, losses).diverged_at is None


def test_a_run_that_failed_is_said_to_have_failed():
    curves = [*runs({}), curve("hook", 0, [], failed="rank 0 failed:\nTraceback\nValueError: no such hook")]
    row = verdict(curves)
    assert (row.verdict, row.sentence) == (FAILED, "failed: rank 0 failed: ... ValueError: no such hook")
    with pytest.raises(RecordsError, match="no run of the reference exact has ended well"):
        conclude_all([curve("exact", 0, [], failed="no loss")])


def test_the_fastest_hook_without_harm_is_recommended():
    gaps = {"fine": (0.0, 0.003), "slow": (0.0, 0.003), "harmful": (0.3, 0.003)}
    result = conclude(runs(gaps, step_s={"fine": 0.1, "slow": 0.2, "harmful": 0.01}), ["exact", *gaps])
    assert (result.best.name, result.first.name) == ("fine", "fine")
    assert result.rows[3].reached is None
    assert result.reference.reached_s / result.best.reached_s == pytest.approx(3, rel=0.2)
    assert result.recommendation().startswith("Use fine: it reaches a loss of 2.0")


def test_a_hook_that_gains_nothing_is_not_recommended():
    result = conclude(runs({"hook": (0.0, 0.003)}, step_s={"hook": 0.29}), ["exact", "hook"])
    assert result.best.name == "exact"


def test_runs_of_different_length_are_compared_over_the_steps_they_share():
    curves = [dataclasses.replace(each, losses=each.losses[: 200 - 10 * each.seed]) for each in runs({"hook": (0, 0)})]
    assert conclude(curves, ["exact", "hook"]).steps == 160


def test_a_metric_counts_by_its_last_value():
    logged = dataclasses.replace(CONDITIONS, metric="val_loss")
    values = {"exact": 1.5, "hook": 1.7}
    curves = [
        curve(name, seed, falling(seed), metric=((50, 9.0), (200, value + seed / 100)), conditions=logged)
        for name, value in values.items()
        for seed in range(3)
    ]
    assert verdict(curves).gap.mean == pytest.approx(0.2)
