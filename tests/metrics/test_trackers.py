"""Sinks against the real packages, which `make integrations` installs."""

from __future__ import annotations

import importlib.util
import math
import time

import pytest

from gradwire.metrics import JSONL, MLflow, Prometheus, Record, TensorBoard, WandB

pytestmark = pytest.mark.integrations
NEEDED = ("tensorboard", "wandb", "mlflow", "prometheus_client")
RECORDS = [
    Record(10, 1e9, "exact", "measuring", {"sent_bytes": 2.0, "grad_norm": math.nan}),
    Record(20, 1e9 + 1, "int8", "int8: fastest", {"sent_bytes": 3.0, "grad_norm": 0.5}),
    Record(30, 1e9 + 2, "int8", "int8: fastest", {"sent_bytes": 4.0, "grad_norm": 0.25}),
]


@pytest.fixture(autouse=True, scope="module")
def installed():
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(f"not installed: {', '.join(missing)}; `make integrations` installs what these tests need")


def write_all(sink):
    sink.open()
    for record in RECORDS:
        sink.write(record)


def scalars(folder):
    """Steps and values of the bytes, and the texts of the hook, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    sent = [(event.step, event.value) for event in events.Scalars("gradwire/sent_bytes")]
    texts = events.Tensors("gradwire/hook/text_summary")
    return sent, [event.tensor_proto.string_val[0].decode() for event in texts]


def test_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    sink = TensorBoard(tmp_path / "ours")
    write_all(sink)
    sink.close()
    with SummaryWriter(str(tmp_path / "theirs")) as writer:
        sink = TensorBoard(writer)
        write_all(sink)
        sink.close()
        writer.add_scalar("mine", 1.0)  # it is still open
    for folder in ("ours", "theirs"):
        assert scalars(tmp_path / folder) == ([(10, 2.0), (20, 3.0), (30, 4.0)], ["measuring", "int8: fastest"])


@pytest.mark.filterwarnings("default")
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    assert wandb.run is None
    sink = WandB(mode="offline", dir=str(tmp_path), project="gradwire-tests")
    write_all(sink)
    ours = wandb.run
    assert ours.summary["gradwire/hook"] == "int8: fastest"
    sink.close()
    assert wandb.run is None
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    until_s = time.monotonic() + 60  # another process of wandb writes it, a moment after finish() has returned
    while file.read_bytes().count(b"gradwire/sent_bytes") < len(RECORDS):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    theirs = wandb.init(mode="offline", dir=str(tmp_path), project="gradwire-tests")
    sink = WandB(project="not used")
    write_all(sink)
    sink.close()
    assert theirs.step == 0  # the step numbers are the user's
    theirs.log({"loss": 1.0}, step=0)
    assert wandb.run is theirs
    theirs.finish()


@pytest.mark.filterwarnings("default")
def test_mlflow_file_store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    uri = (tmp_path / "mlruns").as_uri()
    sink = MLflow(tracking_uri=uri, experiment="gradwire-tests")
    write_all(sink)
    sink.close()
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("gradwire-tests").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["gradwire.hook"] == "int8: fastest"
    history = client.get_metric_history(run.info.run_id, "gradwire/sent_bytes")
    assert [(metric.step, metric.value) for metric in history] == [(10, 2.0), (20, 3.0), (30, 4.0)]
    mlflow.set_tracking_uri(uri)
    with mlflow.start_run() as theirs:
        sink = MLflow()
        write_all(sink)
        sink.close()
        assert client.get_run(theirs.info.run_id).info.status == "RUNNING"
        assert client.get_run(theirs.info.run_id).data.metrics["gradwire/sent_bytes"] == 4.0


def test_prometheus_reads_our_text(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    path = tmp_path / "gradwire.prom"
    write_all(Prometheus(path, run='a "b"\n'))
    samples = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }
    assert samples["gradwire_sent_bytes"] == ({"run": 'a "b"\n'}, 4.0)
    assert samples["gradwire_info"][0] == {"run": 'a "b"\n', "hook": "int8", "reason": "int8: fastest"}


def test_one_run_has_several_sinks(tmp_path):
    """On a hook, with the real packages: the same numbers everywhere."""
    import json

    from gradwire.testing import spawn_ranks

    spawn_ranks(2, trained, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    sent, (hook,) = scalars(tmp_path / "board")
    assert sent == [(line["step"], line["sent_bytes"]) for line in lines]
    assert [step for step, _ in sent] == [2, 4, 6]
    assert hook == "int8"


def trained(rank, size, folder):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import gradwire

    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    hook = gradwire.register(model, "int8")
    gradwire.metrics.record(hook, JSONL(f"{folder}/run.jsonl"), TensorBoard(f"{folder}/board"), every=2)
    for _ in range(6):
        model(torch.ones(2, 32)).sum().backward()
    hook.close()
