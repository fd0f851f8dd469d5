"""The recorder of losses, in the ways in which scripts train."""

import json

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.testing import spawn_ranks
from gradwire.tools.launch.plan import RunPlan
from gradwire.tools.measure import losses
from gradwire.tools.measure.losses import RunCurves
from gradwire.tools.records.records import PLAIN

STEPS = 5


def plain(model, optimizer, step):
    loss = model(torch.ones(1, 1)).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def accumulating(model, optimizer, step):
    with model.no_sync():
        first = model(torch.ones(1, 1)).sum() / 2
        first.backward()
    second = model(2 * torch.ones(1, 1)).sum() / 2
    second.backward()
    optimizer.step()
    return first.item() + second.item()


SCALER = torch.amp.GradScaler("cpu", init_scale=1024.0)


def scaled(model, optimizer, step, scaler=SCALER):
    loss = model(torch.ones(1, 1)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def checkpointed(model, optimizer, step):
    """Its backward pass runs another one inside."""
    loss = model(checkpoint(torch.sin, torch.ones(1, 1, requires_grad=True), use_reentrant=True)).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def of_a_list(model, optimizer, step):
    two = [model(torch.ones(1, 1)).sum(), 3 * model.module.bias.sum()]
    torch.autograd.backward(two)
    optimizer.step()
    return sum(loss.item() for loss in two)


WAYS = {way.__name__: way for way in (plain, accumulating, scaled, checkpointed, of_a_list)}


def train(rank, size, folder, way, hook):
    """Returns what the recorder should have seen."""
    torch.manual_seed(rank)
    job = {"steps": STEPS, "metric": "val_loss", "hook": hook, "link": None, "gather": None}
    plan = RunPlan(folder, "compare", "", job)
    losses.start(plan)
    losses.start(plan)
    module = nn.Linear(1, 1)
    model = DistributedDataParallel(module) if hook else module
    if hook:
        losses.hooked(model, plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 + 0.1 * (not hook) * rank)
    seen = []
    for step in range(STEPS + 2):
        optimizer.zero_grad()
        seen.append(WAYS[way](model, optimizer, step))
        gradwire.log("val_loss", torch.tensor(float(step + rank)))
        gradwire.log("other", 0.0)
    losses._recorders[folder].finish()
    return seen[:STEPS]


@pytest.mark.parametrize(("way", "hook"), [*((way, "exact") for way in WAYS), ("accumulating", PLAIN), ("plain", "")])
def test_every_step_has_its_loss_averaged_over_the_ranks(tmp_path, way, hook):
    seen = spawn_ranks(2, train, str(tmp_path), way, hook)
    found = RunCurves(str(tmp_path))
    found.update()
    assert found.steps == STEPS
    assert found.mean_losses() == pytest.approx([sum(pair) / 2 for pair in zip(*seen, strict=True)], rel=1e-6)
    assert found.metric()[0] == (1, 0.5)
    assert len(found.step_s()) == STEPS - 1
    assert (found.ranks[1].sent_bytes is None) == (hook in ("", PLAIN))


def shapeless(rank, size, folder):
    plan = RunPlan(folder, "compare", "", {"steps": STEPS, "metric": None, "hook": "exact", "link": None})
    losses.start(plan)
    nn.Linear(2, 2)(torch.ones(3, 2)).backward(torch.ones(3, 2))


def test_a_loss_that_is_not_a_scalar_is_named(tmp_path):
    spawn_ranks(1, shapeless, str(tmp_path))
    found = RunCurves(str(tmp_path))
    found.update()
    assert found.problem().startswith("backward() was called on a tensor of shape (3, 2)")
    assert found.mean_losses() == []


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path):
    path, found = tmp_path / "curve-1.jsonl", RunCurves(str(tmp_path))
    lines = [{"rank": 0, "size": 1}, [1, 2.5, 0.0], [2, 2.25, 0.1]]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text[:-5])
    found.update()
    assert found.mean_losses() == [2.5]
    path.write_text(text)
    found.update()
    assert found.mean_losses() == [2.5, 2.25]


def test_logging_does_nothing_outside_of_a_comparison():
    gradwire.log("val_loss", 1.0)
