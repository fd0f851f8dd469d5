"""The bench verb: which cells are measured, what a next call goes on with; and once for real, interrupted."""

import json
import signal
import subprocess
import sys

import pytest

from gradwire.errors import SpecError
from gradwire.tools.cli import main
from gradwire.tools.measure import grid
from gradwire.tools.measure.grid import BenchGrid
from gradwire.tools.records.jsonl import append, read
from gradwire.tools.records.records import Cell, Origin, Settings

from ..cli.test_cli import children, wait_until_gone
from ..report.kit import run


@pytest.fixture
def ranks(monkeypatch):
    """Answers in the place of ranks; a list of what was asked for."""
    asked = []

    def answer(target, nproc, job, *, report, timeout_s):
        asked.append((nproc, job["link"], job["settings"]["seed"], *job["hooks"]))
        report(0.5, "training")
        results = [run(hook).as_dict() for hook in job["hooks"]]
        return [[{key: result[key] for key in ("record", "split", "losses")} for result in results]] * nproc

    monkeypatch.setattr(grid, "run_ranks", answer)
    return asked


def call(path, *options):
    return main(["bench", "--out", str(path), "--hooks", "int8", *options])


def test_baselines_come_first_and_specs_are_canonical():
    made = BenchGrid(hooks=["fp16", "exact", "int8:block=256"], links=["1000mbit", "1gbit", "none"], ranks=[2, 2])
    assert made.hooks == ["exact", "noop", "fp16", "int8"]
    assert made.links == ["1gbit", "none"]
    assert made.cells()[0] == Cell(0, 2, "1gbit", "exact")
    assert len(made.cells()) == 8
    assert len(BenchGrid().cells()) > 10


def test_every_cell_is_measured_once(tmp_path, ranks, capsys):
    path = tmp_path / "records.jsonl"
    assert call(path, "--links", "none", "1gbit", "--ranks", "2", "4", "--repeats", "2", "--seed", "7") == 0
    hooks = ("exact", "noop", "int8")
    assert ranks == [(size, link, seed, *hooks) for seed in (7, 8) for size in (2, 4) for link in ("none", "1gbit")]
    held = read(path).runs
    assert len({each.cell for each in held}) == len(held) == 24
    assert {(each.cell.link, each.link_bits_per_s) for each in held} == {("none", None), ("1gbit", 1e9)}
    assert {each.settings.nproc for each in held} == {2, 4}
    assert {each.origin for each in held} == {Origin.here()}
    printed = capsys.readouterr()
    assert "4 ranks, link none, repeat 2 of 2: training" in printed.err
    assert "### Link 1gbit, 4 ranks" in printed.out
    assert printed.out.endswith(f"24 records in {path}; as a page: gradwire report {path}\n")


def test_resume_measures_only_what_is_missing(tmp_path, ranks, capsys):
    path = tmp_path / "records.jsonl"
    assert call(path) == 0
    assert call(path) == 2
    assert "add --resume to measure what it does not hold yet" in capsys.readouterr().err
    with path.open("a") as file:
        file.write('{"schema": 1, "cell": {"rep')
    ranks.clear()
    assert call(path, "--resume", "--links", "none", "100mbit", "--hooks", "int8", "int4") == 0
    assert ranks == [(2, "none", 0, "int4"), (2, "100mbit", 0, "exact", "noop", "int8", "int4")]
    said = capsys.readouterr().err
    assert "line 4 half-written: dropped" in said
    assert "3 of 8 cells are in" in said
    assert len(read(path).runs) == 8
    assert read(path).torn == []
    ranks.clear()
    assert call(path, "--resume", "--json") == 0
    assert ranks == []
    content = json.loads(capsys.readouterr().out)
    assert [each["cell"]["hook"] for each in content["records"]] == ["exact", "noop", "int8"]


@pytest.mark.parametrize(
    ("done", "told"),
    [
        (0, "nothing is saved yet, as all hooks of a link and number of ranks train in turns and end together\n"),
        (1, "3 of 9 cells are in {path}; continue with --resume\n"),
        (2, "6 of 9 cells are in {path}; continue with --resume\n"),
    ],
)
def test_ctrl_c_says_what_is_saved_and_resume_goes_on_from_there(tmp_path, ranks, monkeypatch, capsys, done, told):
    path = tmp_path / "records.jsonl"
    links = ["none", "1gbit", "100mbit"]
    answer = grid.run_ranks

    def interrupted(*order, **options):
        if len(ranks) == done:
            raise KeyboardInterrupt
        return answer(*order, **options)

    with monkeypatch.context() as patched:
        patched.setattr(grid, "run_ranks", interrupted)
        assert call(path, "--links", *links) == 130
    said = capsys.readouterr().err
    assert f"gradwire bench: {told.format(path=path)}" in said
    assert said.endswith("gradwire: interrupted\n")
    assert len(read(path).runs) == 3 * done
    assert call(path, "--links", *links, *(["--resume"] if done else [])) == 0
    assert [link for _, link, *_ in ranks] == links
    assert len(read(path).runs) == 9


def test_what_does_not_compare_is_not_added(tmp_path, ranks, capsys):
    path = tmp_path / "records.jsonl"
    assert call(path) == 0
    assert call(path, "--resume", "--steps", "9") == 2
    assert "holds runs that differ from these in steps (40 and 9) and so are not comparable" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    append(other, [run("int8")])
    assert call(other, "--resume") == 2
    said = capsys.readouterr().err
    assert "machine (Some <Processor> & Co and" in said
    assert "and so are not comparable: take another --out" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--links", "fast"], "link 'fast'"),
        (["--ranks", "1"], "ranks must be at least 2"),
        (["--ranks", "2", "100000"], "the number of ranks must be between 1 and"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--hooks", "int9"], "unknown hook 'int9'"),
        (["--hooks", "plain", "--links", "1gbit"], "plain cannot run on an emulated link"),
    ],
)
def test_bad_input_has_a_short_message_and_exit_code_2(tmp_path, ranks, capsys, options, message):
    path = tmp_path / "records.jsonl"
    assert call(path, *options) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()
    assert ranks == []


def test_a_place_that_cannot_be_written_is_known_before_the_first_cell(tmp_path, ranks, capsys):
    assert call(tmp_path / "nowhere" / "records.jsonl") == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert ranks == []


@pytest.mark.parametrize("verb", ["bench", "report"])
def test_help_has_examples(capsys, verb):
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"  gradwire {verb} " in text
    assert "examples:" in text


def test_settings_of_a_grid_are_checked():
    with pytest.raises(SpecError, match="seed"):
        BenchGrid(settings=Settings(seed=-1))


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_an_interrupted_bench_keeps_what_is_done_and_goes_on(tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    options = ["--hooks", "int8", "--steps", "2", "--links", "none", "500mbit", "--out", str(path)]
    command = (sys.executable, "-m", "gradwire", "bench", *options)
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while "500mbit" not in bench.stderr.readline():
            assert bench.poll() is None
        started = children(bench.pid)
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate(timeout=540)
    finally:
        bench.kill()
    assert (bench.returncode, out) == (130, "")
    assert f"3 of 6 cells are in {path}; continue with --resume" in err
    for process in started:
        wait_until_gone(process)
    assert [each.cell.hook for each in read(path).runs] == ["exact", "noop", "int8"]
    assert main(["bench", *options, "--resume"]) == 0
    runs = {(each.cell.link, each.cell.hook): each for each in read(path).runs}
    assert len(runs) == 6
    for each in runs.values():
        assert len(each.losses) == each.record.steps == 2
        assert len(each.record.step_s) == 1
        assert each.split.compute_s + each.split.wait_s == pytest.approx(each.record.median_s)
    free, slow = runs["none", "exact"], runs["500mbit", "exact"]
    assert free.losses == slow.losses
    assert free.record.sent_bytes == slow.record.sent_bytes > 3 * runs["none", "int8"].record.sent_bytes
    assert slow.split.wire_s >= 0.9 * 8 * slow.record.sent_bytes / 500e6
    assert runs["none", "noop"].split.wire_s == 0
    assert "### Link 500mbit, 2 ranks" in capsys.readouterr().out
