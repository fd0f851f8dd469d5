"""The benchmark of predictions: what `show` makes of a record, without any ranks."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import predictions

FIT = {"alpha_s": 0.0, "bytes_per_s": 1e6, "r_squared": 1.0}
FREE = {"alpha_s": 0.0, "bytes_per_s": 1e15, "r_squared": 1.0}
COMPUTE = {"forward_s": 0.1, "backward_s": 0.2, "after_s": 0.0, "ready_s": [0.2], "cores": 1.0, "crowd": 2.0}
TRACE = {"sends": [{"work_s": 0.0, "collective": "all_gather", "size": 4, "sent_bytes": 1e5}], "work_s": 0.05}
PROBE = {"size": 4, "fits": {"all_gather": FIT}, "cpu_cost": {"all_gather": FREE}, "hosts": [], "others": 0.0}


def turn(step_s, others=0.0):
    return {"step_s": [step_s, step_s], "cpu_s": 0.1, "others": others}


def record(measured_s):
    """A step of 0.3 s, then 0.1 s on the wire and 0.05 s of work on half a core: 0.5 s."""
    disturbed = {**COMPUTE, "forward_s": 9.0, "others": 0.9}
    return {
        "workload": "gpt",
        "ranks": 4,
        "cores": 2,
        "rate": "1gbit",
        "traces": {"noop": [[]], "int8": [[TRACE]]},
        "computes": [disturbed, {**COMPUTE, "others": 0.0}],
        "probes": [
            {"size": 4, "fits": {"all_gather": FIT}, "cpu_cost": {"all_gather": FREE}, "hosts": [], "others": 0}
        ],
        "turns": {"noop": [turn(0.3)], "int8": [turn(measured_s), turn(99.0, others=0.8)]},
    }


def test_a_record_is_predicted_from_its_quiet_half():
    (error,) = predictions.show_cell(record(0.5))
    assert error == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("measured_s", "misses"), [(0.5, False), (0.45, False), (0.6, True), (0.3, True)])
def test_the_goals_decide_how_the_benchmark_ends(tmp_path, capsys, measured_s, misses):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record(measured_s)) + "\n")
    with pytest.raises(SystemExit) as ended:
        predictions.show(Namespace(files=[path]))
    assert bool(ended.value.code) == misses
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 predictions: ")


def test_the_model_meets_the_goals_on_the_recorded_measurements(capsys):
    """As long as nobody changes the cost model, this cannot change: everything is in the file."""
    with pytest.raises(SystemExit) as ended:
        predictions.show(Namespace(files=[Path(predictions.__file__).parent / "results" / "predictions.jsonl"]))
    assert not ended.value.code, capsys.readouterr().out
