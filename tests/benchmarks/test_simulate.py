"""The benchmark of `gradwire simulate`: what it makes of measured ranks, without starting any."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import simulate

pytestmark = pytest.mark.usefixtures("recorded_work")

FREE = {"alpha_s": 0.0, "bytes_per_s": 1e15, "r_squared": 1.0}
SLOW = {"alpha_s": 0.05, "bytes_per_s": 1e15, "r_squared": 1.0}
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


def _found(cpu_cost):
    """Two buckets, of which the first is full halfway; twice as slow as the rank saw it."""
    return {
        "measured_s": {"1mbit": {"noop": 0.2, "exact": 4.0}, "100gbit": {"noop": 0.2, "exact": 0.2}},
        "compute": {"forward_s": 0.03, "backward_s": 0.06, "after_s": 0.01, "ready_s": [0.03, 0.06], "cores": 1},
        "buckets": [[("b", [200, 300])], [("a", [300, 200]), ("c", [300])]],
        "cpu_cost": dict.fromkeys(COLLECTIVES, cpu_cost),
    }


def _own_s(found, ranks):
    return {(row["link"], row["hook"]): row["own_s"] for row in simulate.predicted(found, ranks)}


def test_predictions_stand_beside_what_was_measured(capsys):
    rows = simulate.predicted(_found(FREE), 2)
    assert [(row["link"], row["hook"], row["measured_s"]) for row in rows] == [
        ("1mbit", "noop", 0.2),
        ("100gbit", "noop", 0.2),
        ("1mbit", "exact", 4.0),
        ("100gbit", "exact", 0.2),
    ]
    for row in rows:
        assert row["own_s"] >= 0.2 - 1e-9
        assert row["simulated_s"] == pytest.approx(row["own_s"], rel=0.2)
    assert rows[2]["own_s"] > 8 * 4 * 120_300 / 1e6 > rows[3]["own_s"]
    assert simulate.error({"own_s": 1.2, "measured_s": 1.0}, "own") == pytest.approx(0.2)
    simulate.print_rows(2, "1mbit", rows[:1])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["noop", "200.0", "200.0", "+0%", "200.0", "+0%"]


def test_ranks_that_share_cores_pay_more_for_collectives(monkeypatch):
    monkeypatch.setattr(simulate, "cores", lambda: 2)
    free, alone, shared = (
        _own_s(*case)["100gbit", "exact"] for case in ((_found(FREE), 8), (_found(SLOW), 2), (_found(SLOW), 8))
    )
    assert alone - free > 0.05
    assert shared - free > 3 * (alone - free)
