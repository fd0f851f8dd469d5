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

from ..tools.records.curves import runs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts find each other in their own folder

import error
import error_plot
import kernels
import low_bits
import peer_envs
import peers
import peers_page
import references
import simulated_workers
import time_to_loss
import verdicts

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


def test_repeats_of_a_comparison_have_seeds_of_their_own():
    curves = runs({"plain": (0.0, 0.0), "sign": (0.1, 0.004)}, seeds=7)
    found = verdicts.judged(curves, ["exact", "plain", "sign"], seeds=3)
    assert [comparison.seeds for comparison in found] == [(0, 1, 2), (3, 4, 5)]  # the third one is not complete
    plain, sign = verdicts.table(found).splitlines()[2:]
    assert plain == "| `plain` | no harm seen: 2 of 2 |" + " 0.00000 to 0.00000 |" * 3
    assert sign.startswith("| `sign` | hurts: 2 of 2 | 0.")


def test_peers_are_a_table_and_a_chart(tmp_path):
    same = {"ranks": 2, "rate": "1gbit", "date": "2026-11-18", "cpu_ms": [60.0], "error": 5e-3, "identical": True}
    rows = [
        {**same, "hook": "grace:qsgd", "step_ms": [300.0, 340.0], "sent_mb": 8.7},
        {**same, "hook": "int8", "step_ms": [100.0, 110.0], "sent_mb": 8.5},
        {**same, "hook": "noop", "step_ms": [50.0, 50.0], "sent_mb": 0.0},
        {**same, "hook": "bagua", "failed": "cannot be installed: needs <CUDA>"},
    ]
    peers_page.write(rows, tmp_path, "busy")
    lines = peers_page.table(rows).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| no communication", "| gradwire `int8`", "| GRACE, qsgd"]
    assert "| 105 | 100-110 | 55 | 60 | yes |" in lines[3]
    assert "needs <CUDA>" in lines[-1]
    page, chart = ((tmp_path / name).read_text() for name in ("peers.md", "peers.svg"))
    assert "**busy**" in page
    assert len(ET.fromstring(chart).findall(".//{http://www.w3.org/2000/svg}title")) == 3


def test_time_to_loss_is_read_off_a_curve():
    assert time_to_loss.steps_to([4.0, 3.0, 2.0], 10, 2.5) == 15.0
    assert time_to_loss.steps_to([4.0, 3.0, 2.0], 10, 1.0) is None
    curves = [
        {"ranks": 2, "seed": 0, "method": method, "every": 10, "losses": [4.0 - rate * i for i in range(46)]}
        for method, rate in (("plain", 0.05), ("int8", 0.04))
    ]
    times = [
        {"ranks": 2, "rate": "1gbit", "hook": hook, "step_ms": [ms]} for hook, ms in (("plain", 100.0), ("int8", 40.0))
    ]
    lines = time_to_loss.table(curves, times, 2).splitlines()
    assert lines[2] == "| plain | 30.0 s (300) |"
    assert "| int8 | 15.0 s (375) |" in lines
    assert ET.fromstring(time_to_loss.picture(curves, times, 2)) is not None


def test_a_peer_never_brings_its_own_torch(tmp_path):
    info = tmp_path / "peer-1.0.dist-info"
    info.mkdir()
    needs = ["torch>=99", "nvidia-nccl", "numpy", "numpy<1; extra == 'old'", "packaging<1", "no-such-package>=2"]
    (info / "METADATA").write_text("Name: peer\nVersion: 1.0\n" + "".join(f"Requires-Dist: {need}\n" for need in needs))
    assert sorted(peer_envs.missing(tmp_path)) == ["no-such-package>=2", "packaging<1"]
    assert peer_envs.version(tmp_path, "Peer") == "1.0"
    with pytest.raises(peer_envs.InstallError, match="no such thing"):
        peer_envs.run([sys.executable, "-c", "raise ValueError('no such thing')"])


def test_rounds_of_all_passes_are_kept_and_a_failure_stays():
    rows = {}
    for step_ms in (1.0, 2.0):
        peers.merge(rows, {"hook": "int8", "step_ms": [step_ms], "cpu_ms": [step_ms]})
        peers.merge(rows, {"hook": "bagua", "failed": f"pass {step_ms}"})
    assert rows["int8"]["step_ms"] == [1.0, 2.0]
    peers.merge(rows, {"hook": "int8", "failed": "hangs"})
    peers.merge(rows, {"hook": "int8", "step_ms": [3.0], "cpu_ms": [3.0]})
    assert (rows["int8"]["failed"], rows["bagua"]["failed"]) == ("hangs", "pass 1.0")
