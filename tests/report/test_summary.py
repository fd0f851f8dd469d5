import json
import math
from dataclasses import replace

import pytest

from gradwire.report import RecordsError, advise, summarise, to_markdown
from gradwire.tools.records.records import NO_LINK, Cell
from gradwire.tools.report.columns import COLUMNS
from gradwire.tools.report.crossover import crossovers, find, rate_text
from gradwire.tools.report.summary import by_latency
from gradwire.tools.report.write import to_json

from .kit import run, runs

SLOW = "100mbit"
LIMITED = (SLOW, "1gbit")


def group(*members):
    (only,) = summarise(members).groups
    return only


def at(ms, hook, link=NO_LINK, **changes):
    """A run whose steps take so long, give or take 1%."""
    return run(hook, link, step_s=tuple(ms / 1e3 * (0.99 + 0.02 * step / 20) for step in range(21)), **changes)


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


def test_bits_a_value_do_not_depend_on_the_ranks():
    for each in summarise(runs(ranks=(2, 4, 8))).groups:
        assert each.bits_per_value(each.row("int8")) == pytest.approx(8.2)


def test_one_broken_repeat_breaks_the_row():
    row = group(run("int8"), run("int8", repeat=1, kept_promises=False, verified="error 9")).row("int8")
    assert not row.record.kept_promises
    assert row.record.verified == "error 9"


def test_below_ten_percent_nothing_is_worth_it():
    advice = advise(group(at(100, "exact"), at(91.5, "noop"), at(92, "int8")))
    assert (advice.hook, advice.title, advice.code) == (None, "Do not compress", "")
    assert "100.0 ms a step with the exact exchange, 91.5 ms with none, so no hook can gain more than 9.3%" in (
        advice.reason
    )


def test_a_limit_that_is_slower_than_the_baseline_is_noise():
    advice = advise(group(at(100, "exact"), at(110, "noop"), at(60, "int8")))
    assert (advice.hook, advice.title) == (None, "Too noisy to say")
    assert "100.0 ms a step with the exact exchange, 110.0 ms with none" in advice.reason


def test_a_gain_within_the_spread_is_none():
    advice = advise(group(at(100, "exact"), at(50, "noop"), at(99.5, "int8")))
    assert advice.hook is None
    assert advice.reason.startswith("No hook is faster than exact by more than the spread")


def test_the_fastest_wins_and_of_equals_the_most_exact():
    base = [at(100, "exact"), at(50, "noop"), at(80, "bf16"), at(60, "int4")]
    best = advise(group(*base, at(60.2, "int8")))
    assert (best.hook, best.code) == ("int8", 'gradwire.register(ddp_model, "int8")')
    assert "60.2 ms a step against 100.0 ms for exact: 1.66x, where no hook can pass 2.00x" in best.reason
    assert advise(group(*base, at(70, "int8"))).hook == "int4"


@pytest.mark.parametrize(
    "flaw", [{"loss": 3.1}, {"kept_promises": False}, {"identical": False}, {"loss": math.nan}], ids=str
)
def test_a_hook_with_a_flaw_is_not_recommended(flaw):
    base = [at(100, "exact"), at(50, "noop"), at(80, "bf16")]
    advice = advise(group(*base, at(60, "int4", **flaw)))
    assert advice.hook == "bf16"
    assert ("above exact: int4" in advice.reason) == ("loss" in flaw)
    alone = advise(group(*base[:2], at(60, "int4", **flaw)))
    assert alone.hook is None
    assert ("(int4) ends with a higher loss" in alone.reason) == ("loss" in flaw)


def test_without_baselines_or_steps_nothing_is_said():
    assert "no run of noop" in advise(group(run("exact"), run("int8"))).reason
    assert "no run of exact and noop" in advise(group(run("int8"))).reason
    few = [replace(each, record=replace(each.record, step_s=each.record.step_s[:3])) for each in runs(links=(SLOW,))]
    assert "3 timed steps say too little" in advise(group(*few)).reason


def test_a_crossover_lies_between_the_rates_around_it():
    groups = summarise(
        [at(100, "exact", "1gbit"), at(200, "int8", "1gbit"), at(100, "exact", SLOW), at(50, "int8", SLOW)]
    ).groups
    (crossing,) = find(groups, "int8")
    assert crossing.bits_per_s == pytest.approx(math.sqrt(1e8 * 1e9))
    assert crossing.pays_below
    assert crossovers(groups) == ["int8 (2 ranks): faster than exact below about 316 Mbit/s (interpolated)"]


def test_hooks_that_behave_alike_share_a_sentence():
    (words,) = crossovers(summarise(runs()).groups)
    assert words.endswith("(2 ranks): faster than exact up to 1 Gbit/s, not without a limit")
    assert words.startswith("powersgd, bf16, ")
    assert crossovers(summarise(runs(links=(NO_LINK,))).groups) == []
    always = summarise([at(ms, hook, link) for link in (NO_LINK, SLOW) for hook, ms in (("exact", 9), ("int8", 5))])
    assert crossovers(always.groups) == ["int8 (2 ranks): faster than exact at every rate measured"]


@pytest.mark.parametrize(("rate", "words"), [(2.5e9, "2.5 Gbit/s"), (123e6, "123 Mbit/s"), (56e3, "56 kbit/s")])
def test_rates_in_words(rate, words):
    assert rate_text(rate) == words


def test_markdown_holds_the_numbers_of_the_records():
    summary = summarise(runs())
    text = to_markdown(summary)
    tables = [block for block in text.split("\n\n") if block.startswith("| hook")]
    assert len(tables) == len(summary.groups)
    for table, each in zip(tables, summary.groups, strict=True):
        head, rule, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        assert head == ["hook", *(column.head for column in COLUMNS)]
        assert len(rule) == len(head)
        assert [line[0] for line in lines] == [row.hook + ("" if row.record.averages else " †") for row in each.rows]
        for line, row in zip(lines, each.rows, strict=True):
            assert float(line[1]) == pytest.approx(1e3 * row.record.median_s, abs=0.06)
            assert float(line[5]) == pytest.approx(row.record.sent_bytes / 1e6, abs=0.006)
            assert float(line[7]) == pytest.approx(row.record.gradient_error, rel=0.05)
        assert f"**{advise(each).title}.**" in text
    assert "torch 2.13.0" in text


def test_broken_promises_show_in_the_table():
    text = to_markdown(summarise([run("exact"), run("noop"), run("int8", kept_promises=False)]))
    assert "3.000 !" in text
    assert "! broken promise found by Hook.verify()" in text


def test_json_has_advice_and_figures():
    content = json.loads(to_json(summarise(runs()), None))
    assert [each["link"] for each in content["groups"]] == [NO_LINK, "1gbit", SLOW]
    slow = content["groups"][-1]
    assert slow["hook"] == "int4"
    assert slow["rows"]["int4"]["speed_up"] == pytest.approx(
        run("exact", SLOW).record.median_s / run("int4", SLOW).record.median_s
    )


def test_runs_that_do_not_compare_are_refused():
    with pytest.raises(RecordsError, match="there is no record"):
        summarise([])
    other = run("int8")
    with pytest.raises(RecordsError, match="runs with steps 40 and 9, which do not compare"):
        summarise([run("exact"), replace(other, settings=replace(other.settings, steps=9))])


def test_runs_of_two_machines_are_not_compared():
    other = run("int8")
    with pytest.raises(RecordsError, match=r"runs with cores \d+ and 99, which do not compare"):
        summarise([run("exact"), replace(other, origin=replace(other.origin, cores=99))])


def test_hooks_that_did_not_take_turns_are_said_to_have_been_measured_apart():
    exact, later = run("exact"), replace(run("int8"), began="2026-01-02T00:00:00+00:00")
    assert "measured at different times" in to_markdown(summarise([exact, later]))
    assert "measured at different times" not in to_markdown(summarise([exact, run("int8")]))


def test_links_of_different_latency_have_crossovers_of_their_own():
    far = [replace(each, cell=replace(each.cell, link=f"{each.cell.link},latency=5ms")) for each in runs(links=LIMITED)]
    near, told = runs(links=LIMITED), to_markdown(summarise([*runs(links=LIMITED), *far]))
    (alone,) = (line for line in to_markdown(summarise(near)).splitlines() if "int8" in line and "ranks): " in line)
    assert alone in told.splitlines()
    assert alone.replace("(2 ranks)", "(2 ranks, latency=5ms)") in told.splitlines()


def test_json_has_null_for_what_is_no_number():
    told = to_json(summarise([run("exact"), run("int8", loss=math.nan)]), None)
    rows = json.loads(told, parse_constant=pytest.fail)["groups"][0]["rows"]
    assert (rows["int8"]["loss"], rows["exact"]["loss"]) == (None, 3.0)


def test_a_link_without_a_limit_is_the_fast_end_whatever_the_latency():
    far = replace(run("int8", SLOW), cell=Cell(0, 2, f"{SLOW},latency=5ms", "int8"))
    summary = summarise([run("int8"), run("int8", SLOW), far])
    assert [[each.link for each in alike] for alike in by_latency(summary.groups)] == [
        [SLOW, NO_LINK],
        [f"{SLOW},latency=5ms", NO_LINK],
    ]
