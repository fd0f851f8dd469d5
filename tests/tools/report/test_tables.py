"""Markdown and JSON hold the numbers of the records."""

import json
import math
from dataclasses import replace

import pytest

from gradwire.report import advise, summarise, to_markdown
from gradwire.tools.records.records import NO_LINK
from gradwire.tools.report.tables import COLUMNS
from gradwire.tools.report.write import to_json

from .kit import SLOW, run, runs


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


def test_a_failed_verification_is_marked_in_the_table():
    text = to_markdown(summarise([run("exact"), run("noop"), run("int8", kept_promises=False)]))
    assert "3.000 !" in text
    assert "! Hook.verify() failed" in text


def test_json_has_the_recommendation_and_the_numbers():
    content = json.loads(to_json(summarise(runs()), None))
    assert [each["link"] for each in content["groups"]] == [NO_LINK, "1gbit", SLOW]
    slow = content["groups"][-1]
    assert slow["hook"] == "int4"
    assert slow["rows"]["int4"]["speed_up"] == pytest.approx(
        run("exact", SLOW).record.median_s / run("int4", SLOW).record.median_s
    )


def test_a_note_says_if_hooks_were_measured_at_different_times():
    exact, later = run("exact"), replace(run("int8"), began="2026-01-02T00:00:00+00:00")
    assert "measured at different times" in to_markdown(summarise([exact, later]))
    assert "measured at different times" not in to_markdown(summarise([exact, run("int8")]))


def test_every_latency_has_its_own_crossovers():
    near = runs(links=(SLOW, "1gbit"))
    far = [replace(each, cell=replace(each.cell, link=f"{each.cell.link},latency=5ms")) for each in near]
    lines = to_markdown(summarise([*near, *far])).splitlines()
    (alone,) = (line for line in to_markdown(summarise(near)).splitlines() if "int8" in line and "ranks): " in line)
    assert alone in lines
    assert alone.replace("(2 ranks)", "(2 ranks, latency=5ms)") in lines


def test_json_has_null_for_nan():
    text = to_json(summarise([run("exact"), run("int8", loss=math.nan)]), None)
    rows = json.loads(text, parse_constant=pytest.fail)["groups"][0]["rows"]
    assert (rows["int8"]["loss"], rows["exact"]["loss"]) == (None, 3.0)
