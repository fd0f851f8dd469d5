"""The recommendation of a report, from measured rows."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from gradwire.report import advise
from gradwire.tools.cli.advise import to_text
from gradwire.tools.measure.advise import Advice
from gradwire.tools.measure.advise import Row as MeasuredRow
from gradwire.tools.measure.headroom import Headroom

from .kit import BITS, PARAMS, SLOW, at, group, run, runs


def test_nothing_is_recommended_if_communication_takes_less_than_10_percent():
    advice = advise(group(at(100, "exact"), at(91.5, "noop"), at(92, "int8")))
    assert (advice.hook, advice.title, advice.code) == (None, "Do not compress", "")
    assert "A step takes 100.0 ms with exact and would take 91.5 ms without communication" in advice.reason
    assert "communication takes 8.5% of it" in advice.reason


def test_a_noop_that_is_slower_than_exact_is_noise():
    advice = advise(group(at(100, "exact"), at(110, "noop"), at(60, "int8")))
    assert (advice.hook, advice.title) == (None, "Too noisy to say")
    assert "100.0 ms with exact and would take 110.0 ms without communication" in advice.reason


def test_a_gain_within_the_spread_does_not_count():
    wide, narrow = ([at(100, "exact", spread=s), at(50, "noop"), at(80, "int8", spread=s)] for s in (0.3, 0.1))
    advice = advise(group(*wide))
    assert advice.hook is None
    assert advice.reason.startswith("The median step under int8 is 1.25x as fast as under exact, but the steps differ")
    assert advise(group(*narrow)).hook == "int8"
    assert advise(group(at(100, "exact"), at(50, "noop"), at(92, "int8"))).hook is None


def test_the_smallest_error_wins_among_the_fastest():
    base = [at(100, "exact"), at(50, "noop"), at(80, "bf16"), at(60, "int4")]
    best = advise(group(*base, at(60.2, "int8")))
    assert (best.hook, best.code) == ("int8", 'gradwire.register(ddp_model, "int8")')
    assert "60.2 ms instead of 100.0 ms with exact: it is 1.66x as fast, and no hook can make it more than 2.00x" in (
        best.reason
    )
    assert advise(group(*base, at(70, "int8"))).hook == "int4"


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ({"loss": 3.1}, "int4 (loss 3.100 against 3.000 with exact)"),
        ({"loss": math.nan}, "int4 (loss nan against 3.000 with exact)"),
        ({"kept_promises": False}, "int4 (Hook.verify() failed)"),
        ({"identical": False}, "int4 (the parameters of the ranks differ)"),
    ],
    ids=str,
)
def test_a_hook_with_a_flaw_is_named_but_not_recommended(flaw, reason):
    base = [at(100, "exact"), at(50, "noop"), at(80, "bf16")]
    advice = advise(group(*base, at(60, "int4", **flaw)))
    assert advice.hook == "bf16"
    assert f"Faster, but excluded: {reason}." in advice.reason
    alone = advise(group(*base[:2], at(60, "int4", **flaw)))
    assert alone.hook is None
    assert f"is excluded: {reason}." in alone.reason


def test_neither_noop_nor_plain_ddp_is_recommended():
    plain = replace(run("exact").record, hook="plain", step_s=(0.05,) * 21)
    ddp = replace(run("exact"), record=plain, cell=replace(run("exact").cell, hook="plain"))
    assert advise(group(at(100, "exact"), at(40, "noop"), ddp)).hook is None


def test_without_baselines_or_enough_steps_there_is_no_recommendation():
    assert "no measurement of noop" in advise(group(run("exact"), run("int8"))).reason
    assert "no measurement of exact and noop" in advise(group(run("int8"))).reason
    few = [replace(each, record=replace(each.record, step_s=each.record.step_s[:3])) for each in runs(links=(SLOW,))]
    advice = advise(group(*few))
    assert (advice.title, advice.hook) == ("No recommendation", None)
    assert "only 3 timed steps, and at least 8 are needed" in advice.reason


MAX_ERROR = 0.02


def _random_table(rng):
    """Runs of all hooks with random times, spreads and errors; some errors, and then the loss too, are too large."""
    spread, slowest_ms = rng.uniform(0, 0.2), rng.uniform(100, 130)
    made = []
    for hook in BITS:
        ms = {"exact": 100.0, "noop": rng.uniform(60, 110)}.get(hook, rng.uniform(60, slowest_ms))
        error = 1e-8 if hook == "exact" else rng.uniform(0, 1.5 * MAX_ERROR)
        loss = 3.0 if error <= MAX_ERROR else 3.5
        made.append(at(ms, hook, spread=spread if hook != "noop" else 0.0, gradient_error=error, loss=loss))
    return made


def _measured_by_advise(table):
    """The same times and errors as `gradwire advise` has them. It does not know the loss but limits the error."""
    exact, noop = (next(each.record for each in table if each.record.hook == hook) for hook in ("exact", "noop"))
    headroom = Headroom(
        with_s=(exact.median_s,) * 8, without_s=(noop.median_s,) * 8, ranks=2, link=None, wanted_steps=16
    )
    rows = tuple(
        MeasuredRow(
            hook=each.record.hook,
            predicted_s=each.record.median_s,
            measured_s=each.record.median_s,
            error=each.record.gradient_error,
            sent_bytes=each.record.sent_bytes,
            step_s=each.record.step_s,
        )
        for each in table
        if each.record.averages
    )
    return Advice(headroom=headroom, rows=rows, max_error=MAX_ERROR, params=PARAMS)


def test_command_line_and_report_recommend_the_same_hook():
    rng, seen = random.Random(0), Counter()
    for _ in range(500):
        table = _random_table(rng)
        report, advice = advise(group(*table)), _measured_by_advise(table)
        assert advice.recommendation.hook == report.hook
        assert to_text(advice).endswith(f"\n    {report.code or advice.line}")
        seen[report.hook] += 1
    assert len(seen) == len(BITS) - 1  # every hook but exact and noop, and none
    assert seen[None] > 50
