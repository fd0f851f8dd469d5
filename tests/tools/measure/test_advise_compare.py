"""`gradwire advise --compare`: advice, then a comparison of the hooks whose harm is a question, then an answer."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.tools.cli import advise as verb
from gradwire.tools.cli import main
from gradwire.tools.measure import compare as comparing
from gradwire.tools.records.curves import read_curves

from ..records.curves import curve, falling
from .test_advise import FREE, ROWS, advice

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
net, teacher = (nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64)) for _ in range(2))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
torch.manual_seed(100 + dist.get_rank())
for step in range(10_000):
    x = torch.randn(16, 64)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), teacher(x).detach()).backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return ["--nproc", "2", "train.py"]


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_from_the_headroom_to_an_answer_on_a_script_that_runs(script, capfd, forked_ranks):
    """On so slow a link (84, 21 and 3 ms per step) that the load of the machine does not decide what is faster."""
    words = ["advise", "--link", "50mbit", "--steps", "8", "--hooks", "int8", "sign", "--compare", "runs.jsonl"]
    words += ["--compare-steps", "20", "--seeds", "2", "--json"]
    assert main([*words, *script]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["headroom"]["is_network_bound"]
    assert found["promising"] == ["sign"]
    compared = found["comparison"]
    names = list(dict.fromkeys(["exact", found["pick"], "sign"]))
    assert [row["name"] for row in compared["rows"]] == names
    assert (compared["steps"], compared["seeds"], compared["ranks"], compared["link"]) == (20, [0, 1], 2, "50mbit")
    assert compared["best"] in names
    assert compared["recommendation"].startswith(f"Use {compared['best']}: ")
    curves = read_curves(Path("runs.jsonl"))
    assert {run.key for run in curves} == {(name, seed) for name in names for seed in (0, 1)}
    assert found["compare"] == f"gradwire compare --hooks {' '.join(names)} --steps 20 --link 50mbit --nproc 2 train.py"


@pytest.fixture
def advised(script, monkeypatch):
    """The verb without processes: runs `(hook, seed)` that were never run, and advice that was never measured."""
    started = []

    def run_once(plan, conditions, entry, seed, steps, report, server=None):
        started.append((entry.name, seed))
        made = curve(entry.name, seed, falling(seed, spread=0.0)[:steps])
        return replace(made, conditions=conditions, first=made.losses[:2])

    monkeypatch.setattr(comparing, "fork_server", lambda nproc, modules: nullcontext())
    monkeypatch.setattr(comparing, "run_once", run_once)

    def call(found, *words):
        monkeypatch.setattr(verb, "advise", lambda script, **options: found)
        assert main(["advise", *words, *script]) == 0
        return started

    return call


def test_the_recommended_hook_is_compared_too_and_the_answer_comes_last(advised, capsys):
    started = advised(advice(), "--compare", "--compare-steps", "50", "--seeds", "2")
    again = [("exact", 0)]  # the first run of the reference is repeated
    assert started == [("exact", 0), *again, ("int8", 0), ("int4", 0), ("exact", 1), ("int8", 1), ("int4", 1)]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Use int8. A step takes 60.0 ms instead of 100.0 ms with exact") for line in lines)
    assert any(line.startswith("train.py was run with 2 seeds on 2 ranks") for line in lines)
    assert lines[-1] == "runs: compare.jsonl"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (advice(headroom=FREE), "Nothing was compared: the training is not network-bound."),
        (advice(ROWS[:-1]), "Nothing was compared: no hook with an error above 0.02 is predicted to be 1.10x as fast"),
    ],
)
def test_it_says_so_if_there_is_nothing_to_compare(advised, capsys, found, message):
    assert advised(found, "--compare") == []
    assert message in capsys.readouterr().out
    assert not Path("compare.jsonl").exists()
