"""`gradwire compare`: what it refuses, what it continues, and one comparison of a script that really runs."""

import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest

from gradwire.errors import SpecError
from gradwire.tools.cli import main
from gradwire.tools.launch import RunFailed, Script
from gradwire.tools.measure import compare as comparing
from gradwire.tools.measure.compare import CHECK_STEPS, Entry, Plan, compare
from gradwire.tools.records.curves import read_curves

from ..records.curves import curve, falling

SCRIPT = """
import argparse
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, default=1.0)
parser.add_argument("--bad", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
net, teacher = (nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2))
model = DistributedDataParallel(net)
net[0].weight.register_hook(lambda grad: args.scale * grad)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
torch.manual_seed(100 + dist.get_rank())
for step in range(20 if args.bad == "short" else 10_000):
    x = torch.randn(16, 32)
    out = model(x)
    loss = nn.functional.mse_loss(out, teacher(x).detach())
    optimizer.zero_grad()
    if args.bad == "shape":
        out.backward(torch.ones_like(out))
    else:
        (loss * float("nan") if args.bad == "nan" and step > 30 else loss).backward()
    if args.bad == "crash" and step == 20:
        raise ValueError("the script is wrong")
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return Script("train.py")


@pytest.mark.long
def test_harm_is_found_in_a_script_that_runs_and_what_goes_wrong_is_said(script, capsys):
    """Planted harm, the sign hook, plain DDP, and every way to fail, in one go, as starting processes takes seconds."""
    hooks = ["--hooks", "exact", "plain", "sign"]
    bad = [word for kind in ("short", "shape", "crash", "nan") for word in ("--variant", f"{kind}=@exact --bad {kind}")]
    words = ["compare", *hooks, "--variant", "planted=@exact --scale 0.7", *bad, "--steps", "60", "--seeds", "3"]
    words += ["--report", "page.html", "--json", "--nproc", "2", "train.py"]
    assert main(words) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    rows = {row["name"]: row for row in result["rows"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "exact": "",
        "plain": "no harm seen",
        "sign": "hurts",
        "planted": "hurts",
        "short": "failed",
        "shape": "failed",
        "crash": "failed",
        "nan": "hurts",
    }
    assert rows["plain"]["sentence"] == "no harm seen: the losses are the same"
    assert set(rows["plain"]["gap_by_seed"].values()) == {0}
    assert rows["planted"]["gap"] > rows["planted"]["half_width"]
    assert "trained 20 steps, fewer than the 60 of --steps" in rows["short"]["sentence"]
    assert "tensor of shape (16, 8)" in rows["shape"]["sentence"]
    assert rows["crash"]["sentence"].endswith("ValueError: the script is wrong")
    assert "not finite from step 32 on (3 of 3 seeds)" in rows["nan"]["sentence"]
    assert len({rows["exact"]["final_loss_by_seed"][seed] for seed in "012"}) == 3
    page = Path("page.html").read_text()
    assert all(f'id="{chart}"' in page for chart in ("losses-step", "losses-seconds", "gaps", "forest"))
    before = Path("compare.jsonl").read_text()
    assert main(["compare", *hooks, "--steps", "60", "--seeds", "3", "--nproc", "2", "train.py"]) == 0
    assert Path("compare.jsonl").read_text() == before  # nothing was missing
    assert "hurts: +" in capsys.readouterr().out
    assert main(["report", "compare.jsonl", "--format", "md"]) == 0
    assert "- **planted** hurts: +" in capsys.readouterr().out


# -- without processes -------------------------------------------------------------------------------------------------


class Runs:
    """In place of processes: runs that were never run."""

    def __init__(self, **losses):
        self.losses, self.started = losses, []

    def __call__(self, plan, conditions, entry, seed, steps, report, server=None):
        self.started.append((entry.name, seed, steps))
        found = self.losses.get(entry.name, lambda seed: falling(seed, spread=0.0))(seed)
        made = dataclasses.replace(found, seed=seed) if not isinstance(found, list) else curve(entry.name, seed, found)
        return dataclasses.replace(made, conditions=conditions, losses=made.losses[:steps], first=made.losses[:2])


@pytest.fixture
def plan(script, monkeypatch):
    monkeypatch.setattr(comparing, "fork_server", lambda nproc, modules: nullcontext())
    return Plan(script=script, entries=(Entry("exact", "exact"), Entry("int4", "int4")), steps=200, nproc=2)


def test_every_run_is_done_once_and_the_first_of_the_reference_is_checked(plan, monkeypatch, tmp_path):
    runs = Runs()
    monkeypatch.setattr(comparing, "run_once", runs)
    path = tmp_path / "runs.jsonl"
    assert len(compare(plan, path)) == 6
    again = ("exact", 0, CHECK_STEPS)
    assert runs.started == [("exact", 0, 200), again, ("int4", 0, 200)] + [
        (name, seed, 200) for seed in (1, 2) for name in ("exact", "int4")
    ]
    runs.started.clear()
    more = dataclasses.replace(plan, seeds=(0, 1, 2, 3), entries=(*plan.entries, Entry("int8", "int8")))
    assert len(compare(more, path)) == 12
    assert [name for name, *_ in runs.started] == ["int8", "int8", "int8", "exact", "int4", "int8"]
    with pytest.raises(SpecError, match=r"other conditions: steps \(200 and 100\)"):
        compare(dataclasses.replace(plan, steps=100), path)


def test_a_hook_that_fails_is_not_tried_again_with_other_seeds_but_in_the_next_call(plan, monkeypatch, tmp_path):
    runs = Runs(int4=lambda seed: curve("int4", seed, [], failed="RegisterError: no"))
    monkeypatch.setattr(comparing, "run_once", runs)
    path = tmp_path / "runs.jsonl"
    assert [each.name for each in compare(plan, path) if each.failed] == ["int4"]
    assert [each[0] for each in runs.started].count("int4") == 1
    runs.losses.clear()
    assert not any(each.failed for each in compare(plan, path))
    assert len(read_curves(path)) == 6


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"exact": lambda seed: curve("exact", seed, [], failed="no loss")}, "the reference exact failed with seed 0"),
        ({"exact": lambda seed: [2.0] * 50 + [math.nan] * 150}, "no finite loss from step 51 on with seed 0"),
        (
            {"exact": lambda seed: falling(0, spread=0.0)},
            "seeds 0 and 1 give the same losses, so the seeds have no effect",
        ),
        ({"int4": lambda seed: falling(seed + 50)}, "the first loss with seed 0 is .* the data order or the initial"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_and_kept(plan, monkeypatch, tmp_path, losses, message):
    monkeypatch.setattr(comparing, "run_once", Runs(**losses))
    with pytest.raises(RunFailed, match=message):
        compare(plan, tmp_path / "runs.jsonl")
    assert read_curves(tmp_path / "runs.jsonl")


def test_a_script_that_is_not_deterministic_is_refused(plan, monkeypatch, tmp_path):
    calls = iter(range(100))
    monkeypatch.setattr(comparing, "run_once", Runs(exact=lambda seed: falling(next(calls), steps=200)))
    with pytest.raises(RunFailed, match=r"two runs of exact with seed 0 differ at step 1: .* --seed-arg"):
        compare(plan, tmp_path / "runs.jsonl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hooks", "exact"], "there is nothing to compare: give at least two hooks or variants"),
        (["--hooks", "exact", "int4", "int4"], "int4 is given twice"),
        (["--hooks", "exact", "int9"], "int9"),
        (["--hooks", "exact", "int4", "--steps", "5"], "steps must be at least 10, got 5"),
        (["--hooks", "exact", "int4", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--hooks", "exact", "int4", "--reference", "int8"], "--reference int8 must be one of exact, int4"),
        (["--hooks", "exact", "plain", "--link", "1gbit"], "--link slows down hooks only, and plain has none"),
        (["--hooks", "exact", "int4", "--link", "fast"], "link 'fast'"),
        (["--hooks", "exact", "int4", "--nnodes", "2"], "compare runs on one machine: leave out --nnodes"),
        (["--hooks", "exact", "powersgd/bf16"], "powersgd cannot reduce-scatter"),
        (["--hooks", "exact", "int8/bf16", "--gather", "bf16"], "int8/bf16 says how parameters are gathered"),
        (["--variant", "lion"], "variant 'lion' must be 'NAME=ARGS' or 'NAME=@HOOK ARGS'"),
        (["--hooks", "exact", "int4", "--out", "train.py"], "train.py, line 2 is not a run of `gradwire compare`"),
        (["--hooks", "exact", "int4", "--out", "none/runs.jsonl"], "there is no folder none"),
    ],
)
def test_bad_input_has_a_message_and_starts_nothing(script, capsys, monkeypatch, words, message):
    monkeypatch.setattr(comparing, "run_once", None)
    assert main(["compare", *words, "--nproc", "2", "train.py"]) in (1, 2)
    assert message in capsys.readouterr().err


def test_variants_have_arguments_and_may_have_a_hook():
    assert Entry.of_variant("lion=--optimizer lion --name 'a b'") == Entry(
        "lion", "plain", ("--optimizer", "lion", "--name", "a b")
    )
    assert Entry.of_variant("small=@int4:block=32 --lr 1") == Entry("small", "int4:block=32", ("--lr", "1"))


@pytest.mark.parametrize(("option", "words"), [(None, []), ("--seed", ["--seed", "3"]), ("seed=", ["seed=3"])])
def test_a_script_may_take_its_seed_as_an_argument(option, words):
    assert comparing._seed_words(option, 3) == words


def test_pairs_name_a_gather_and_may_differ_in_their_first_loss(tmp_path, monkeypatch):
    assert Entry.of_hook("int8/bf16") == Entry("int8/bf16", "int8", gather="bf16")
    assert Entry.of_hook("int8/exact") == Entry("int8", "int8", gather="exact")
    assert Entry.of_variant("a=@int8/bf16 --lr 1") == Entry("a", "int8", ("--lr", "1"), "bf16")

    def rounded(seed):
        return [loss + 0.01 for loss in falling(seed, spread=0.0)]

    monkeypatch.setattr(comparing, "run_once", Runs(**dict.fromkeys(("int8/bf16", "int8"), rounded)))
    monkeypatch.setattr(comparing, "fork_server", lambda *args: nullcontext())
    plan = Plan(script=Script("x", module=True), entries=tuple(map(Entry.of_hook, ("exact", "int8/bf16"))), seeds=(0,))
    assert len(compare(plan, tmp_path / "pairs.jsonl")) == 2
    other = dataclasses.replace(plan, entries=tuple(map(Entry.of_hook, ("exact", "int8/exact"))))
    with pytest.raises(RunFailed, match="nothing has been averaged by then"):
        compare(other, tmp_path / "specs.jsonl")
