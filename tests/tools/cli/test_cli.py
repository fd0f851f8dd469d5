import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import gradwire
from gradwire.tools.cli import VERBS, main
from gradwire.tools.cli import demo as cli_demo
from gradwire.tools.measure import advise, headroom
from gradwire.tools.records.jsonl import append
from gradwire.tools.records.records import Settings

from .. import small_builtin
from ..report.kit import runs
from .messages import is_short

GRADWIRE = (sys.executable, "-m", "gradwire")


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradwire {gradwire.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "example"),
    [(["--help"], "gradwire advise --nproc 2 train.py"), (["demo", "-h"], "gradwire demo --link 100mbit,latency=5ms")],
)
def test_help_has_examples(capsys, argv, example):
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert example in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: <verb>"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--nproc", "0"], "nproc must be at least 1, got 0"),
        (["demo", "--nproc", "100000"], "the number of ranks must be between 1 and "),
        (["probe", "--nproc", "100000"], "the number of ranks must be between 1 and "),
        (["probe", "--nproc", "1"], "nproc must be at least 2, as one rank has nothing to exchange; got 1"),
        (["demo", "--nproc", "two"], "invalid int value: 'two'"),
        (["demo", "--steps", "0"], "steps must be at least 1, got 0"),
        (["demo", "--steps", "-3"], "steps must be at least 1, got -3"),
        (["demo", "--seed", "-1"], "seed must be between 0"),
        (["demo", "--hooks"], "expected at least one argument"),
        (["demo", "--hooks", "fp61"], "unknown hook 'fp61'. Did you mean 'fp16'? Available: "),
        (["demo", "--hooks", "fp16:acumulate=wire"], "fp16: unknown option 'acumulate'"),
        (["demo", "--hooks", "fp16:accumulate=int"], "must be one of fp32, wire, got 'int'"),
        (["demo", "--nproc", "1"], "ranks must be at least 2, as one rank has nothing to exchange; got 1"),
        (["demo", "--link", "fast"], "link 'fast'"),
        (["demo", "--hooks", "noop"], "noop does not average, so it cannot be a candidate"),
        (["demo", "--report", "/"], "cannot write /: it is a folder; name a file in it"),
        (["bench", "--out", "/"], "cannot write /: it is a folder; name a file in it"),
        (["bench", "--out", "/no/such/x.jsonl"], "cannot write /no/such/x.jsonl: there is no folder"),
        (
            ["report", "x.jsonl", "--out", "/no/such/x.html"],
            "cannot write /no/such/x.html: there is no folder",
        ),
        (["simulate", "--report", "/no/such/x.html"], "cannot write /no/such/x.html: there is no folder"),
        (["simulate", "--compute", "5"], "--compute must be a number with us, ms, s, got '5'; write for instance 50us"),
        (["advise", "--hooks", "int8", __file__], f"put -- before the script: --hooks int8 -- {__file__}"),
        (["demo", "--frobnicate"], "unrecognized arguments: --frobnicate (see gradwire demo --help)"),
        (["run", "--hook", "bf16", "--no-such", __file__], "arguments: --no-such (see gradwire run --help)"),
        (["report", "no-such.jsonl"], "there is no file no-such.jsonl; `gradwire bench --out no-such.jsonl` makes it"),
        (["report", "/"], "cannot read /: it is a folder; name a file of records in it"),
        (["watch", "no.jsonl", "--once"], "there is no file no.jsonl; `gradwire run --metrics no.jsonl ...` makes it"),
        (["watch", "/", "--json"], "cannot read /: it is a folder; name a file of metrics in it"),
        (
            ["run", "--hook", "bf16", "--metrics", "pyproject.toml", __file__],
            "'pyproject.toml' exists and has no metrics, so nothing is added to it",
        ),
    ],
)
def test_bad_input_has_a_short_message_and_exit_code_2(capsys, argv, message):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert is_short(printed.err)
    assert printed.out == ""


@pytest.mark.parametrize(
    "words", [("bench", "--ranks", "2", "64"), ("probe", "--nproc", "64"), ("demo", "--nproc", "64")]
)
def test_no_verb_starts_many_ranks_on_a_few_cores(monkeypatch, tmp_path, capsys, words):
    monkeypatch.setattr("gradwire.tools.launch.launch.cores", lambda: 2)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "ranks must be between 1 and 8 on a machine with 2 cores, got 64\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [("advise", "--report", "train.py"), ("demo", "--report", "train.py"), ("report", "train.py", "--out", "train.py")],
)
def test_no_report_takes_the_place_of_a_script(monkeypatch, tmp_path, capsys, words):
    monkeypatch.chdir(tmp_path)
    script = Path("train.py")
    script.write_text("print('train')")
    assert main(words) == 2
    assert "train.py exists and is not a page, so it is not overwritten" in capsys.readouterr().err
    assert script.read_text() == "print('train')"


WITHOUT_TORCH = """
import sys
from gradwire.tools.cli import main
codes = [main(words) for words in (["--version"], ["--help"], [], ["dmeo"])]
assert codes == [0, 0, 2, 2], codes
assert "torch" not in sys.modules
"""


def test_what_needs_no_torch_does_not_load_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert all(f" {verb} {line} " in words for verb, line in VERBS.items())


def test_ctrl_c_while_torch_loads_ends_without_a_traceback():
    for library in ("libtorch", "_multiarray_umath"):  # numpy makes an ImportError of a KeyboardInterrupt
        demo = subprocess.Popen((*GRADWIRE, "demo"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            while library not in Path(f"/proc/{demo.pid}/maps").read_text():
                assert demo.poll() is None
            demo.send_signal(signal.SIGINT)
            out, err = demo.communicate(timeout=540)
        finally:
            demo.kill()
        assert (demo.returncode, out, err) == (130, "", "gradwire: interrupted\n")


@pytest.fixture(params=["small", pytest.param("built-in", marks=pytest.mark.thorough)])
def model(request, monkeypatch):
    """The model of the demo: a smaller one, or its own."""
    if request.param == "small":
        monkeypatch.setattr(cli_demo, "Settings", partial(Settings, workload=small_builtin.SMALL))
        for module in (headroom, advise):
            monkeypatch.setattr(module, "built_in", small_builtin.script)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_short_demo_measures_trains_and_writes_a_page(tmp_path, monkeypatch, capfd, model, forked_ranks):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "4", "--hooks", "int8", "--link", "10gbit", "--json"]) == 0
    printed = capfd.readouterr()
    content = json.loads(printed.out)
    advice, runs = content["advice"], {run["cell"]["hook"]: run for run in content["records"]}
    assert [row["hook"] for row in advice["hooks"]] == ["exact", "bf16", "int8"]
    assert {*runs} == {"exact", "noop", "int8", advice["pick"]}
    assert {advice["headroom"]["link"], *(run["cell"]["link"] for run in runs.values())} == {"10gbit"}
    assert {(run["record"]["steps"], len(run["losses"]), run["settings"]["seed"]) for run in runs.values()} == {
        (4, 4, 0)
    }
    exact, noop, int8 = (runs[hook]["record"] for hook in ("exact", "noop", "int8"))
    assert exact["sent_bytes"] == 4 * exact["params"]
    assert noop["sent_bytes"] == 0
    assert int8["sent_bytes"] == pytest.approx(exact["sent_bytes"] / 4, rel=0.05)
    assert exact["gradient_error"] < 1e-6 < int8["gradient_error"] < 0.02 < noop["gradient_error"]
    assert [exact["identical"], noop["identical"], int8["identical"]] == [True, False, True]
    assert content["report"] == "gradwire-demo.html"
    page = (tmp_path / "gradwire-demo.html").read_text()
    assert all(f'id="{chart}"' in page for chart in ("headroom-0", "stack-0", "speed-up-2", "error-2", "loss-2"))
    assert f"<h2>{'Use ' + advice['pick'] if advice['compress'] else 'Do not compress'}</h2>" in page
    assert "headroom: step " in printed.err


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGINT, "step", marks=pytest.mark.thorough),
        (signal.SIGTERM, "warming up"),
        pytest.param(signal.SIGKILL, "step", marks=pytest.mark.thorough),
    ],
)
def test_an_interrupted_demo_leaves_nothing_behind(number, moment, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    command = (*GRADWIRE, "demo", "--hooks", "fp16")
    demo = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while moment not in demo.stderr.readline():
            assert demo.poll() is None
        ranks = children(demo.pid)
        assert len(ranks) == 2
        demo.send_signal(number)
        out, err = demo.communicate(timeout=540)
    finally:
        demo.kill()
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert (demo.returncode, out) == (expected[number], "")
    if number != signal.SIGKILL:
        assert err.splitlines()[-1:] == (["gradwire: interrupted"] if number == signal.SIGINT else [])
        # torch keeps a cache of its own there
        assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    for rank in ranks:
        wait_until_gone(rank)
    assert list(tmp_path.iterdir()) == [temporary]


def children(pid):
    """The processes that `pid` has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
        except OSError:
            pass
    return found


def wait_until_gone(pid):
    """Return when the process has ended; the test's own time limit is the limit."""
    while (
        Path(f"/proc/{pid}/stat").exists()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ):
        time.sleep(0.01)


def test_a_terminal_without_a_sign_for_a_character_shows_another(tmp_path):
    records = tmp_path / "records.jsonl"
    append(records, runs())
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    words = (*GRADWIRE, "report", "--format", "md", str(records))
    done = subprocess.run(words, env=env, capture_output=True, timeout=540, check=True)
    assert (b"noop ?" in done.stdout, done.stderr) == (True, b"")


def test_a_full_disk_is_said_so(tmp_path):
    records = tmp_path / "records.jsonl"
    append(records, runs())
    with open("/dev/full", "w") as full:
        words = (*GRADWIRE, "report", "--format", "md", str(records))
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=540, check=False)
    assert (done.returncode, done.stderr) == (1, "gradwire: error: cannot write: No space left on device\n")
