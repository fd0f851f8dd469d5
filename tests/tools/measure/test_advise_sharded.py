"""Advice for models with `fully_shard`: pairs of a spec and a gather."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import gradwire
from gradwire.auto.pilot import TURN_STEPS
from gradwire.tools.cli import main
from gradwire.tools.cli.advise import compare_command, to_text
from gradwire.tools.launch.plan import RunPlan
from gradwire.tools.measure import survey_replicas, survey_sharded
from gradwire.tools.measure.advise import Advice, Row, _replica_settings, survey_first
from gradwire.tools.measure.headroom import Headroom, timed
from gradwire.tools.measure.survey import ROUNDS
from gradwire.tools.measure.uncertainty import MODEL_ERROR
from gradwire.tools.report.page import advice_to_html

from ...kit import models
from ...kit.models import seeded
from ...kit.ranks import Ranks, on_ranks
from ...kit.sharded import mesh_2d, mesh_of, shard, train
from ...kit.versions import sharded_models

BOUND = Headroom(
    with_s=(0.1,) * 8,
    without_s=(0.02,) * 8,
    without_gathers_s=(0.06,) * 8,
    without_reductions_s=(0.06,) * 8,
    ranks=2,
    link=None,
    wanted_steps=32,
)


def row(hook: str, ms: float | None, error: float = 5e-3) -> Row:
    measured = {"measured_s": None} if ms is None else {"measured_s": ms / 1e3, "step_s": (ms / 1e3,) * 4}
    rest: Any = {"predicted_s": 0.05, "error": error, "sent_bytes": 3e6, "gather_bytes": 2e6}
    return Row(hook=hook, **measured, **rest)


ROWS = (row("exact", 100, 0.0), row("int8", 70), row("int8/bf16", 50), row("int8/int8", 30), row("int4", None, 0.07))


def advice(rows: tuple[Row, ...] = ROWS, **options: Any) -> Advice:
    return Advice(headroom=BOUND, rows=rows, max_error=0.02, params=1_000_000, **options)


def test_the_line_names_both_directions_and_weights_of_8_bits_come_with_a_remark() -> None:
    found = advice()
    assert found.line == 'gradwire.register(model, "int8", gather="bf16")'
    remark = "(it changes the weights that the model computes with: compare the loss"
    assert f"Faster, but excluded: int8/int8 {remark}" in found.reason()
    assert "The model computes with parameters rounded to bf16" in found.reason()
    named = advice(any_gather=True)
    assert named.line == 'gradwire.register(model, "int8", gather="int8")'
    assert "parameters of int8, which changes the training: compare the loss first." in named.reason()
    assert advice(ROWS[:2]).line == 'gradwire.register(model, "int8")'
    assert advice((ROWS[0], replace(ROWS[1], measured_s=0.099))).line == "# no hook: FSDP2 as it is"


def test_the_table_has_the_bytes_of_both_directions() -> None:
    lines = to_text(advice()).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("hook/gather"))
    assert "MB grads + params" in lines[first]
    assert lines[first + 1].endswith("changes the weights")
    assert "1.00 + 2.00" in lines[first + 2]
    assert lines[first + 2].endswith("<- use this")
    assert max(map(len, lines)) <= 100
    page = advice_to_html(advice())
    assert "sends what plain FSDP2 sends" in page
    assert "gather=&#34;bf16&#34;" in page


def test_pairs_that_may_hurt_come_with_a_comparison_that_takes_them() -> None:
    faster = replace(ROWS[3], predicted_s=0.02)
    found = advice((*ROWS[:3], faster, ROWS[4]))
    assert [each.hook for each in found.promising()] == ["int8/int8"]
    args = {"compare_steps": 300, "link": None, "nproc": 2, "module": False, "script": "train.py", "args": []}
    command = compare_command(found, SimpleNamespace(**args))  # type: ignore[arg-type]
    assert command == "gradwire compare --hooks exact int8/bf16 int8/int8 --steps 300 --nproc 2 train.py"
    assert advice((*ROWS[:3], faster), any_gather=True).promising() == []


SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
for step in range(400):
    model(torch.randn(8, 128)).square().mean().backward()
    for param in model.parameters():
        param.grad = None
"""


LOW = "int4:exempt=none"


@sharded_models
@on_ranks(2)
def test_both_runs_follow_their_plans(ranks: Ranks) -> None:
    """Without the command: the headroom of a model, and then the survey of another one with its timeline."""
    job = {"steps": 8, "link": "1gbit", "hooks": ["int8/bf16", LOW], "max_error": 0.02}
    plan = RunPlan(str(ranks.folder), "headroom", "", job)
    shard_and_train(ranks, plan, timed, 16)
    (note,) = [note for note in plan.read("times") if note["rank"] == ranks.rank and len(note["times"]) == 8]
    assert note["sharded"]
    compute = {"timeline": note["timeline"], "cores": 1.0, "threads": 1}
    plan = replace(plan, job={**job, "compute": compute})
    with pytest.MonkeyPatch.context() as patch:  # it takes seconds, and with a link only its CPU costs are used
        patch.setattr(survey_sharded, "probe", lambda hook, pairs: SimpleNamespace(cpu_cost={}))
        shard_and_train(ranks, plan, survey_first, 45)
    dist.barrier(ranks.group)
    (found,) = plan.read("survey")
    rows = {each["hook"]: each for each in found["rows"]}
    assert list(rows) == ["exact", "int8/bf16", LOW]
    assert [len(each["step_s"]) for each in rows.values()] == [ROUNDS * TURN_STEPS, ROUNDS * TURN_STEPS, 0]
    assert rows["int8/bf16"]["error"] < 0.02 < rows[LOW]["error"]
    assert rows["exact"]["gather_bytes"] == rows["exact"]["sent_bytes"] / 2 == 4 * found["params"]
    assert min(each["predicted_s"] for each in rows.values()) > 0
    assert min(each["uncertainty"] for each in rows.values()) >= MODEL_ERROR
    assert rows["int8/bf16"]["split"]["encode_s"] > 0


@sharded_models
@on_ranks(4)
def test_both_runs_follow_their_plans_with_replicas(ranks: Ranks) -> None:
    """The same for FSDP2's own HSDP: a hook is how replicas are averaged."""
    job = {"steps": 8, "link": "1gbit", "hooks": ["int8", LOW], "max_error": 0.02}
    plan = RunPlan(str(ranks.folder), "headroom", "", job)
    shard_and_train(ranks, plan, timed, 16, replicas=2)
    (note,) = [note for note in plan.read("times") if note["rank"] == ranks.rank and len(note["times"]) == 8]
    assert note["replicated"]
    assert note["ranks"] == 4
    plan = replace(plan, job={**job, "compute": {"timeline": note["timeline"], "cores": 1.0, "threads": 1}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey_replicas, "probe", lambda hook, pairs: SimpleNamespace(cpu_cost={}))
        shard_and_train(ranks, plan, survey_first, 65, replicas=2)
    dist.barrier(ranks.group)
    (found,) = plan.read("survey")
    rows = {each["hook"]: each for each in found["rows"]}
    assert list(rows) == ["exact", "bf16", "int8", LOW]
    steps = [len(each["step_s"]) for each in rows.values()]
    assert steps == [ROUNDS * TURN_STEPS] * 3 + [0]
    assert rows["int8"]["error"] < 0.02 < rows[LOW]["error"]
    assert rows["exact"]["sent_bytes"] == 4 * found["params"] / 2  # a shard, once to the other of two replicas
    assert rows["int8"]["sent_bytes"] < rows["bf16"]["sent_bytes"] < rows["exact"]["sent_bytes"]
    assert min(each["predicted_s"] for each in rows.values()) > 0


def test_the_advice_for_replicas_is_the_helper_that_builds_them() -> None:
    times = {"with_s": 0.1, "without_s": 0.02, "without_gathers_s": 0.09, "without_replicas_s": 0.05}
    bound = Headroom(ranks=4, link=None, wanted_steps=32, **{name: (value,) * 8 for name, value in times.items()})
    rows = [replace(row(hook, ms, error), gather_bytes=None) for hook, ms, error in REPLICA_ROWS]
    found = Advice(headroom=bound, rows=tuple(rows), max_error=0.02, params=1_000_000)
    assert found.line == 'gradwire.hsdp(model, mesh, units=units, replicas="int8")  # instead of fully_shard'
    assert "Inside a replica gradients are reduced and parameters gathered exactly" in found.reason()
    lines = to_text(found).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("replicas"))
    assert "MB across" in lines[first]
    assert lines[first + 1].endswith("<- use this")
    assert "powersgd" in lines[first + 4]
    assert advice_to_html(found)


REPLICA_ROWS = (("exact", 100.0, 0.0), ("bf16", 80.0, 1e-3), ("int8", 50.0, 5e-3), ("powersgd", None, 0.3))


def test_pairs_are_refused_for_replicas() -> None:
    with pytest.raises(gradwire.SpecError, match=r"write int8, not int8/bf16"):
        _replica_settings(["int8/bf16"], 0.02)


def shard_and_train(
    ranks: Ranks, plan: RunPlan, follow: Callable[[Any, RunPlan], None], steps: int, replicas: int = 1
) -> None:
    model = shard(seeded(models.Deep), mesh_of(ranks) if replicas == 1 else mesh_2d(ranks, replicas))
    follow(model, plan)
    train(model, ranks.rank, steps)


@sharded_models
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_script_with_fully_shard_is_advised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], forked_ranks: None
) -> None:
    """132 kB twice in each direction at 20 Mbit/s are 0.2 s a step."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    words = ("--nproc", "2", "--steps", "8", "--link", "20mbit", "--json", "--hooks", "int8/bf16", "int4")
    code, printed = main(["advise", *words, "--", str(path)]), capfd.readouterr()
    assert code == 0, printed.err
    found = json.loads(printed.out)
    assert found["line"] == 'gradwire.register(model, "int8", gather="bf16")'
    assert found["params"] == 2 * (128 * 128 + 128)
    assert [each["hook"] for each in found["hooks"]] == ["exact", "int8/bf16", "int4"]
    exact, pair, int4 = found["hooks"]
    assert (exact["sent_bytes"], exact["gather_bytes"]) == (4 * 4 * found["params"] / 2, 2 * 4 * found["params"] / 2)
    assert exact["gather_bytes"] / 2 <= pair["gather_bytes"] <= 0.51 * exact["gather_bytes"]
    assert int4["measured_s"] is None
    assert pair["split"]["encode_s"] > 0
    assert found["headroom"]["is_network_bound"]
    assert {"gathers_s", "reductions_s"} <= found["headroom"].keys()  # how long they take depends on the machine's load
