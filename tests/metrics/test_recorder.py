"""What is recorded, by whom and when; several observers on one hook; the norm of the gradients; traces."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import gradwire
from gradwire import RegisterError, SpecError, make_bucket
from gradwire.metrics import Record, Sink, all_threads, record
from gradwire.optim import step_in_backward

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import mesh_2d, mesh_of, shard
from ..kit.trial import loss, raised
from ..kit.versions import sharded_models

LOSSY = "int2:feedback=true,exempt=none"
POWERSGD = "powersgd:rank=1,min_compression=0.5"


class Kept(Sink):
    """Keeps records, and whether it was opened and closed."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.calls: list[str] = []

    def open(self) -> None:
        self.calls.append("open")

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.calls.append("close")


class Broken(Sink):
    def write(self, record: Record) -> None:
        raise OSError("disk full")


def trained(ranks: Ranks, steps: int, *sinks: Sink, spec: str | None = None, **options):
    """A hook after some steps of AdamW with two batches each, and the norm of the gradients of each step."""
    model = ranks.wrap(seeded(models.Deep, 3), bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook = ranks.register(model, spec, optimizer=optimizer, **options)
    if sinks:
        record(hook, *sinks, every=2)
    norms = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with model.no_sync():
            loss(model(batch(ranks.rank, step))).backward()
        loss(model(batch(ranks.rank, 100 + step))).backward()
        norms.append(float(get_total_norm([param.grad for param in model.parameters()])))
        optimizer.step()
    return model, hook, norms


@on_ranks(2, specs=(LOSSY, POWERSGD))
def test_the_first_rank_records_the_step_that_has_just_ended(ranks: Ranks) -> None:
    sink = Kept()
    _, hook, norms = trained(ranks, 5, sink, watch=4)
    residual = math.sqrt(sum(float(kept.square().sum()) for kept in hook.state_dict()["residuals"].values()))
    hook.close()
    if ranks.rank:
        assert (sink.calls, sink.records) == ([], [])
        return
    assert sink.calls == ["open", "close"]
    second, fourth = sink.records
    assert (second.step, second.hook, fourth.step) == (2, str(ranks.exchange), 4)
    for each, norm in ((second, norms[1]), (fourth, norms[3])):
        assert each.values["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert each.values["sent_bytes"] == each.values["received_bytes"] > 0
        assert all(each.values[name] > 0 for name in ("step_s", "buckets", "encode_s", "wire_s", "residual_norm"))
        assert each.values.keys() <= gradwire.metrics.METRICS.keys()
    assert fourth.values["residual_norm"] != residual  # that of step 5
    assert "error" not in second.values
    assert 0 < fourth.values["error"] < 2
    assert fourth.values["update_error"] > 0


@on_ranks(2, specs=("int8",))
def test_values_are_means_over_the_steps_since_the_last_record(ranks: Ranks) -> None:
    """Also after the statistics began again, and after a switch."""
    model, hook, _ = trained(ranks, 1)
    sink = Kept()
    record(hook, sink, every=3)
    for step in range(2, 13):
        loss(model(batch(ranks.rank, step))).backward()
        if step == 6:
            hook.switch("bf16")
        if step == 10:
            hook.reset_stats()
    if ranks.rank == 0:
        sent = {each.step: (each.hook, each.values["sent_bytes"], each.values["buckets"]) for each in sink.records}
        values = 3 * (16 * 16 + 16)
        buckets = len(hook.layouts)
        assert sent[9] == sent[12] == ("bf16", 2 * values, buckets)
        assert sent[3][0] == sent[6][0] == "int8"
        assert sent[3][1:] == sent[6][1:]
        assert values < sent[6][1] < 2 * values


@on_ranks(2, specs=(POWERSGD,))
def test_observers_share_a_hook_and_training_stays_the_same(ranks: Ranks) -> None:
    plain, _, norms = trained(ranks, 4)
    sinks = Kept(), Kept()
    model = ranks.wrap(seeded(models.Deep, 3), bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook = ranks.register(model, optimizer=optimizer, check_every=1, watch=1)
    record(hook, sinks[0], every=1)
    step_in_backward(model, optimizer)
    assert "works from the next step on" in raised(RegisterError, hook.grad_norm)
    record(hook, sinks[1], every=2)
    for step in range(1, 5):
        optimizer.zero_grad()
        with model.no_sync():
            loss(model(batch(ranks.rank, step))).backward()
        loss(model(batch(ranks.rank, 100 + step))).backward()
        assert float(hook.grad_norm()) == pytest.approx(norms[step - 1], rel=1e-5)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    if ranks.rank == 0:
        assert [[each.step for each in sink.records] for sink in sinks] == [[1, 2, 3, 4], [2, 4]]


@on_ranks(2, specs=("int8",))
def test_a_sink_that_fails_is_dropped_and_the_others_go_on(ranks: Ranks) -> None:
    sink, model = Kept(), ranks.wrap(nn.Linear(16, 16))
    hook = ranks.register(model)
    record(hook, Broken(), sink, every=1)
    for step in range(3):
        if ranks.rank == 0 and step == 0:
            with pytest.warns(UserWarning, match=r"the metrics sink Broken failed and gets no more .*disk full"):
                loss(model(batch(0, step))).backward()
        else:
            loss(model(batch(ranks.rank, step))).backward()
    assert len(sink.records) == (3 if ranks.rank == 0 else 0)
    if ranks.rank == 0:
        record(hook, Kept(), every=1)
        with pytest.warns(UserWarning, match="averages outside of a backward pass"):
            hook.begin(make_bucket([torch.ones(4)]), True)
    hook.traced = True
    assert "compiled reducer hides" in raised(RegisterError, lambda: record(hook, sink))
    assert "compiled reducer hides" in raised(RegisterError, hook.grad_norm)
    hook.traced = False
    assert "takes sinks such as" in raised(SpecError, lambda: record(hook))
    assert "takes sinks such as" in raised(SpecError, lambda: record(hook, Kept))  # the class, not an object


class Odd(nn.Module):
    """Parameters of several types, a sparse gradient, and a layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16, sparse=True)
        self.small, self.large = nn.Linear(16, 16, dtype=torch.float16), nn.Linear(16, 16, dtype=torch.float64)
        self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.rare = nn.Linear(16, 16)

    def forward(self, x, use):
        x = x + self.table(torch.tensor([1, 1, 3, 5])) + (x * self.phase).real
        x = x + self.small(x.half()).float() + self.large(x.double()).float()
        return self.rare(x) if use else x


@on_ranks(1, 2, specs=("int8",))
def test_the_norm_of_any_gradients_is_that_of_torch_and_the_same_on_all_ranks(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(Odd), find_unused_parameters=True)
    hook = ranks.register(model)
    for step in range(3):
        model.zero_grad()
        (1000 * model(batch(ranks.rank, step), ranks.rank == 0).square().mean()).backward()
        grads = [param.grad for param in model.parameters()]
        dense = [(grad.to_dense() if grad.is_sparse else grad).to(torch.complex128) for grad in grads]
        norm = hook.grad_norm()
        assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in dense]).norm()), rel=1e-5)
        everyone = hook.gather(norm.double().view(1))
        assert bool((everyone == everyone[0]).all())


@sharded_models
@on_ranks(4, specs=("int8",))
def test_sharded_models_have_records_and_a_norm(ranks: Ranks) -> None:
    sink, plain = Kept(), shard(seeded(models.Deep, 3), mesh_of(ranks))
    hooks = [(plain, ranks.register(plain, gather="bf16"))]
    mesh = mesh_2d(ranks, 2)
    both = shard(seeded(models.Deep, 3), mesh["shard"])
    hooks.append((both, ranks.register(both, "exact", replicas="int8", mesh=mesh)))
    for model, hook in hooks:
        record(hook, sink, every=2)
        for step in range(4):
            loss(model(batch(ranks.rank, step))).backward()  # gradients add up over all passes
        total = get_total_norm([param.grad for param in model.parameters()]).full_tensor()
        assert float(hook.grad_norm()) == pytest.approx(float(total), rel=1e-5)
    assert [each.step for each in sink.records] == ([2, 4, 2, 4] if ranks.rank == 0 else [])
    for each in sink.records:
        assert each.values["sent_bytes"] > 0
        assert "grad_norm" not in each.values
        assert "gather=" in each.hook


@on_ranks(2, specs=("int8:shots=two",))
def test_a_trace_has_the_phases_of_every_chunk(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(nn.Linear, 64, 64))
    ranks.register(model, chunk_bytes=8192)
    for step in range(3):
        if step < 2:
            loss(model(batch(ranks.rank, step, 64))).backward()
            continue
        with torch.profiler.profile(experimental_config=all_threads()) as profile:
            loss(model(batch(ranks.rank, step, 64))).backward()
    path = ranks.folder / f"{ranks.rank}.json"
    profile.export_chrome_trace(str(path))
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("ph") == "X"]
    ours = [each for each in events if each["name"].startswith("gradwire ")]
    for chunk in range(2):
        names = [each["name"] for each in sorted(ours, key=lambda each: each["ts"]) if f"chunk {chunk}" in each["name"]]
        phases = ["encode", "wire (all_to_all on lane 0)", "decode", "wire (all_gather on lane 1)", "decode"]
        assert names == [f"gradwire {phase}: step 3, bucket 0, chunk {chunk}" for phase in phases]
    assert not {each["tid"] for each in ours} & {each["tid"] for each in events if "Backward" in each["name"]}
