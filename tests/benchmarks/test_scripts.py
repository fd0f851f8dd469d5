"""The benchmark scripts work: their parts, on sizes that say nothing about speed."""

import dataclasses
import itertools
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from gradwire.codecs import CODECS
from gradwire.tools.workload import WorkloadSettings

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts find each other in their own folder

import error
import error_plot
import kernels
import low_bits
import references
import simulated_workers

TINY = WorkloadSettings(layers=1, width=32, heads=2, context=16, batch=2, text_bytes=50_000)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """More would only wait for each other on sizes like these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def snapshots():
    return references.gradients(TINY, [0, 2], workers=3)


def test_kernels_are_timed_next_to_memcpy():
    records = list(kernels.measured(["int8", "sign"], numel=5000, repeats=3))
    assert [(r["codec"], r["kernel"]) for r in records] == [
        ("int8", "encode"),
        ("int8", "decode-add"),
        ("int8", "reduce 4 ranks"),
        ("sign", "encode"),
        ("sign", "decode-add"),
    ]
    assert all(len(kernels.multiples(r)) == 3 and min(r["memcpy_s"] + r["kernel_s"]) > 0 for r in records)
    assert kernels.copy_speed(records) > 0


def test_a_missed_goal_is_marked_and_a_rotation_is_charged_for_what_it_adds():
    plain = {"codec": "int4", "kernel": "encode", "memcpy_s": [1.0, 2.0], "kernel_s": [3.0, 6.0], "goal": 2.0}
    assert kernels.line(plain).endswith("<= 2.0  MISSED")
    assert "MISSED" not in kernels.line({**plain, "goal": None})
    rotated = {**plain, "codec": "int4:hadamard=64", "kernel_s": [5.0, 10.0], "goal": None}
    (extra,) = kernels.extras([plain, rotated])
    assert extra["extra"] == 2.0
    assert "MISSED" not in kernels.line(extra)
    assert {kernels.goal(name, "encode") for name in CODECS} == {0.8, 1.0, 2.0, None}


def test_snapshots_hold_every_workers_own_gradient(snapshots):
    flats, parts, before = snapshots[1]
    assert flats.shape == (3, parts[-1].stop)
    assert not torch.equal(flats[0], flats[1])
    assert not torch.equal(flats[0], snapshots[0].flats[0])
    assert torch.equal(before[0], snapshots[0].flats)
    assert [len(snapshot.before) for snapshot in snapshots] == [0, 2]
    assert 1 / 3 < snapshots[0].kappa() <= 1.01


@pytest.mark.parametrize(
    "scheme", [s for s in references.schemes() if s.kind != "variant"], ids=lambda scheme: scheme.name
)
def test_errors_are_ordered(scheme, snapshots):
    row = error.measured(scheme, snapshots)
    assert 0 < row.one < row.two * 1.01
    assert row.two < 2
    assert 0.3 < row.bits < 18
    assert row.single < 1


@pytest.mark.parametrize("spec", error.HOOKED)
def test_hooks_are_measured_like_codecs(spec, snapshots):
    """They code a rank's own share once less, so they lose a little less than the codec alone."""
    row, alone = error.hooked(spec, snapshots), error.measured(references.coded("int4", "default"), snapshots)
    assert 0 < row.two < 1.2 * alone.two
    assert row.bits == pytest.approx(alone.bits, rel=0.1)
    assert error.cells(row)[2:4] == ["-", "-"]
    if "allocate" not in spec:
        assert 0.5 * alone.two < row.two
        assert 0.5 * alone.two_t < row.two_t < alone.two_t


def test_few_bits_leave_small_tensors_exact(snapshots):
    flats, parts, _ = snapshots[0]
    sent = references.coded("int2", "default").sent(flats[0], parts)
    same = [torch.equal(sent[a:b], flats[0][a:b]) for a, b, *_ in parts]
    assert same == [part.exempt for part in parts]
    assert any(same)
    assert not all(same)


def test_emulations_keep_what_their_formats_hold():
    held = torch.tensor([6.0, -4.0, 3.0, 2.0, -1.5, 1.0, 0.5, 0.0]).repeat(5)
    assert torch.equal(references.mxfp4(held), held)
    assert torch.equal(references.mxfp8(held), held)
    assert torch.equal(references.mxfp4(held * 2**-20), held * 2**-20)
    steps = torch.arange(-100.0, 156.0)
    torch.testing.assert_close(references.one_scale(steps), steps)


def test_page_and_plot(snapshots):
    scheme = references.coded("int8", "default")
    row = error.measured(scheme, snapshots)
    bad = dataclasses.replace(row, two=1.0)
    texts, normal = error.texts(TINY, [0, 2], snapshots), ["sign", "0.36", "0.36", "1.0", "met"]
    text = error_plot.page(texts, map(error.cells, [row, bad]), [normal])
    assert "MISSED 1.0e-04" in text
    assert max(map(len, text.splitlines())) <= 120
    root = ET.fromstring(error_plot.plot([row.point(), ("other & more", "emulated", 4.0, 1e-2)]))
    assert root.tag.endswith("svg")
    assert "other & more" in "".join(root.itertext())


def test_labels_of_a_crowd_do_not_overlap():
    taken = [error_plot.around(400, 300, 6)]
    for _ in range(6):
        taken.append(error_plot.place(400, 300, 60, taken)[2])
    assert not any(error_plot.overlap(a, b) for a, b in itertools.combinations(taken, 2))


def test_simulated_workers_that_share_everything_train_like_one():
    sizes = {"steps": 13, "layers": 1, "width": 32, "context": 16, "text-bytes": 1_000_000}
    args = simulated_workers.parse_args(["sync", *(f"--{name}={size}" for name, size in sizes.items())])
    losses = {}
    for name, options in (
        ("sync", {}),
        ("local", {"H": "1", "shared": "1"}),
        ("power", {"rank": "32"}),
        ("local at 2 bits", {"H": "3", "codec": "int2"}),
    ):
        task = simulated_workers.Task(args, seed=1)
        bits = simulated_workers.KINDS[name.split()[0]](task, options)
        losses[name] = task.loss()
    assert bits == pytest.approx(2.25 * 5 / 13)
    assert losses["local"] == pytest.approx(losses["sync"], abs=1e-4)
    assert losses["power"] == pytest.approx(losses["sync"], abs=1e-3)
    assert losses["local at 2 bits"] != pytest.approx(losses["sync"], abs=1e-3)


def test_low_bits_simulates_hooks_and_the_optimizer(monkeypatch):
    monkeypatch.setattr(low_bits, "SETTINGS", dataclasses.replace(TINY, width=64, text_bytes=500_000))
    monkeypatch.setattr(low_bits, "HELD_OUT", 4)
    hook, optimizer = (low_bits.run(method, 5, 19) for method in ("int2:whiten=true", "onebit:warmup=16,refresh=4"))
    assert hook["bits"] == pytest.approx(2.13, abs=0.05)
    assert 1.1 < optimizer["bits"] < 2.0
    assert 0 < abs(hook["loss"] - optimizer["loss"]) < 0.1


def test_gaps_of_low_bits_are_paired_by_seed():
    losses = {("exact", 1): 2.0, ("exact", 2): 3.0, ("int2", 1): 2.1, ("int2", 2): 3.3, ("int2", 3): 9.0}
    rows = [{"method": m, "seed": s, "steps": 9, "loss": loss, "bits": 2.1} for (m, s), loss in losses.items()]
    (line,) = low_bits.table(rows).splitlines()[2:]
    assert line == "| 9 | `int2` | 2.10 | 2 | +0.2000 | +0.28 of 0.707 | +0.300 | +0.100 +0.300 |"
