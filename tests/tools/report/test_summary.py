"""Runs are grouped and pooled, and crossovers are interpolated."""

import math
from dataclasses import replace

import pytest

from gradwire.report import RecordsError, summarise
from gradwire.tools.records.records import NO_LINK, Cell
from gradwire.tools.report.summary import by_latency, crossover_texts, crossovers, rate_text

from .kit import SLOW, at, group, run, runs


def test_groups_are_ordered_by_ranks_and_rate_and_repeats_are_pooled():
    summary = summarise(runs(ranks=(4, 2), links=(SLOW, NO_LINK, "1gbit"), repeats=3))
    assert [(each.ranks, each.link) for each in summary.groups] == [
        (ranks, link) for ranks in (2, 4) for link in (NO_LINK, "1gbit", SLOW)
    ]
    single, pooled = run("int8", SLOW), summary.groups[2].row("int8")
    assert len(pooled.record.step_s) == 3 * len(single.record.step_s)
    assert pooled.repeats == 3
    assert pooled.loss_range == (3.0, 3.002)
    assert pooled.record.loss == pytest.approx(3.001)


def test_bits_per_value_do_not_depend_on_the_ranks():
    for each in summarise(runs(ranks=(2, 4, 8))).groups:
        assert each.bits_per_value(each.row("int8")) == pytest.approx(8.2)


def test_a_row_fails_if_one_of_its_repeats_fails():
    row = group(run("int8"), run("int8", repeat=1, kept_promises=False, verified="error 9")).row("int8")
    assert not row.record.kept_promises
    assert row.record.verified == "error 9"


def test_a_crossover_lies_between_the_neighbouring_rates():
    groups = summarise(
        [at(100, "exact", "1gbit"), at(200, "int8", "1gbit"), at(100, "exact", SLOW), at(50, "int8", SLOW)]
    ).groups
    (crossing,) = crossovers(groups, "int8")
    assert crossing.bits_per_s == pytest.approx(math.sqrt(1e8 * 1e9))
    assert crossing.pays_below
    assert crossover_texts(groups) == ["int8 (2 ranks): faster than exact below about 316 Mbit/s (interpolated)"]


def test_hooks_with_the_same_crossover_share_a_sentence():
    (words,) = crossover_texts(summarise(runs()).groups)
    assert words.endswith("(2 ranks): faster than exact up to 1 Gbit/s, but not without a limit")
    assert words.startswith("powersgd, bf16, ")
    assert crossover_texts(summarise(runs(links=(NO_LINK,))).groups) == []
    always = summarise([at(ms, hook, link) for link in (NO_LINK, SLOW) for hook, ms in (("exact", 9), ("int8", 5))])
    assert crossover_texts(always.groups) == ["int8 (2 ranks): faster than exact at every rate measured"]


@pytest.mark.parametrize(("rate", "words"), [(2.5e9, "2.5 Gbit/s"), (123e6, "123 Mbit/s"), (56e3, "56 kbit/s")])
def test_rates_in_words(rate, words):
    assert rate_text(rate) == words


def test_runs_with_different_settings_are_refused():
    with pytest.raises(RecordsError, match="there is no record"):
        summarise([])
    other = run("int8")
    with pytest.raises(RecordsError, match="runs that differ in steps \\(40 and 9\\) and so are not comparable"):
        summarise([run("exact"), replace(other, settings=replace(other.settings, steps=9))])


def test_runs_of_two_machines_are_refused():
    other = run("int8")
    with pytest.raises(RecordsError, match=r"runs that differ in cores \(\d+ and 99\) and so are not comparable"):
        summarise([run("exact"), replace(other, origin=replace(other.origin, cores=99))])


def test_a_link_without_a_limit_is_the_fast_end_for_every_latency():
    far = replace(run("int8", SLOW), cell=Cell(0, 2, f"{SLOW},latency=5ms", "int8"))
    summary = summarise([run("int8"), run("int8", SLOW), far])
    assert [[each.link for each in alike] for alike in by_latency(summary.groups)] == [
        [SLOW, NO_LINK],
        [f"{SLOW},latency=5ms", NO_LINK],
    ]
