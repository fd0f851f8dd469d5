"""Sinks to files and to the terminal, and what is refused. The other packages are in test_trackers.py."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from gradwire import GradwireError, SpecError, metrics
from gradwire.metrics import JSONL, Prometheus, Record, Sink, Terminal, record

ROOT = Path(__file__).parents[2]
FIRST = Record(10, 1.5, "int8", "", {"step_s": 0.0951, "wait_s": 0.0031, "sent_bytes": 8.5e6, "grad_norm": math.nan})
SECOND = Record(20, 2.5, "bf16", 'bf16: "fast"\\', {"grad_norm": math.inf, "error": 0.05})


def written(sink: Sink, *records: Record) -> None:
    sink.open()
    for each in records:
        sink.write(each)
    sink.close()


def test_jsonl_is_continued_after_a_torn_line_and_has_no_nan(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    written(JSONL(path), FIRST)
    with path.open("ab") as file:
        file.write(b'{"step": 11, "ti')
    written(JSONL(path), SECOND)
    first, torn, second = path.read_text().splitlines()
    assert json.loads(first)["grad_norm"] is None
    assert torn == '{"step": 11, "ti'
    got = Record.from_dict(json.loads(second))
    assert math.isnan(got.values["grad_norm"])
    assert (got.step, got.time_s, got.hook, got.reason) == (20, 2.5, "bf16", 'bf16: "fast"\\')
    assert got.values["error"] == 0.05


def test_files_that_cannot_be_written_are_refused_and_stay(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('train')\n")
    for sink, why in (
        (JSONL(script), "has no metrics"),
        (JSONL(tmp_path), "directory"),
        (Prometheus("/proc/x"), "name another"),
    ):
        with pytest.raises(SpecError, match=why):
            sink.open()
    assert script.read_text() == "print('train')\n"


@pytest.mark.parametrize("label", ["a-b", "2a", "__a", "ä"])
def test_labels_that_prometheus_refuses_are_refused(tmp_path, label):
    with pytest.raises(SpecError, match="must be letters, digits and _"):
        Prometheus(tmp_path / "x.prom", **{label: "1"})


def test_prometheus_has_the_last_record_and_escapes_labels(tmp_path):
    path = tmp_path / "gradwire.prom"
    written(Prometheus(path, run='a"b\n'), FIRST, SECOND)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        r'gradwire_step{run="a\"b\n"} 20',
        r'gradwire_time_seconds{run="a\"b\n"} 2.5',
        r'gradwire_grad_norm{run="a\"b\n"} +Inf',
        r'gradwire_error{run="a\"b\n"} 0.05',
        r'gradwire_info{run="a\"b\n",hook="bf16",reason="bf16: \"fast\"\\"} 1',
    ]
    assert path.read_text().count("# TYPE ") == len(lines)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_terminal_prints_a_line(capsys):
    written(Terminal("mine"), FIRST, SECOND)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "mine: step 10: int8, 95.1 ms per step, 3.1 ms waiting, 8.50 MB sent, gradient norm nan"
    assert second == 'mine: step 20: bf16, gradient norm inf, error 0.05 (bf16: "fast"\\)'


@pytest.mark.parametrize(
    ("sink", "package"), [("TensorBoard", "tensorboard"), ("WandB", "wandb"), ("MLflow", "mlflow")]
)
def test_a_missing_package_is_named_when_the_sink_is_made(monkeypatch, sink, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        GradwireError, match=rf"{sink} needs the package '{package}'.*pip install 'gradwire\[metrics\]'"
    ):
        getattr(metrics, sink)(*(["runs"] if sink == "TensorBoard" else []))


def test_what_is_no_hook_is_refused():
    with pytest.raises(SpecError, match=r"the hook that gradwire\.register has returned, got str"):
        record("int8", Terminal())
    with pytest.raises(SpecError, match="every must be a whole number"):
        record("int8", Terminal(), every=0)


def test_the_page_lists_every_metric():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    assert rows == dict(metrics.METRICS)
