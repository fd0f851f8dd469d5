"""The tables of `benchmarks/advice.py`: which goals a cell meets."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts find each other in their own folder

import advice_table


def _row(hook, *step_ms, predicted_ms=None, error=0.0):
    return {"hook": hook, "step_ms": list(step_ms), "predicted_ms": predicted_ms, "error": error}


def _cell(auto_ms):
    rows = [
        _row("plain", 100, 120, 110),
        _row("bf16", 80, 90, 85, predicted_ms=90, error=1e-3),
        _row("int8", 70, 77, 74, predicted_ms=60, error=5e-3),
        _row("sign", 40, 44, 42, predicted_ms=42, error=0.4),
        _row("auto", *auto_ms),
    ]
    told = {"max_error": 0.02, "rounds": 3, "auto_steps": 40, "auto_s": 4.0, "auto_reason": "int8: error 0.005"}
    duel = {row["hook"]: row["step_ms"] for row in rows if row["hook"] in ("auto", "int8", "plain", "bf16")}
    return {"workload": "mlp", "rate": "1gbit", "ranks": 2, "hooks": rows, "duel_ms": duel, **told}


def test_the_best_is_one_that_auto_could_take():
    assert advice_table.best(_cell([70, 77, 74])) == "int8"


def test_rounds_are_compared_with_each_other():
    cell = _cell([77, 77, 77])
    assert advice_table.behind(cell, "int8") == pytest.approx(77 / 74 - 1)
    assert advice_table.behind(cell, "plain") < -0.2
    assert 0 < advice_table.spread(cell, "int8") < 0.05


def test_what_is_missed_is_told(capsys):
    cell = _cell([90, 99, 95])
    met = advice_table.goals(cell)
    assert {goal for goal, ok in met.items() if not ok} == {"predict int8", "auto against int8", "auto against bf16"}
    advice_table.print_cell(cell)
    assert not advice_table.print_summary([cell])
    told = capsys.readouterr().out
    assert "int8            74.0  70.0-77.0           60.0   -19%" in told
    assert "predict: 2 of 3 within the goal" in told
    assert "auto: 1 of 3 within the goal" in told
    assert "auto against bf16 (bf16), 3 rounds: +11.8% (standard error" in told
    assert "missed: mlp, 1gbit: auto against bf16" in told


def test_a_cell_that_meets_all_goals_passes():
    cell = _cell([70, 77, 74])
    cell["hooks"][2]["predicted_ms"] = 75
    assert advice_table.print_summary([cell])
