import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gradwire
from gradwire.cli import main

GRADWIRE = (sys.executable, "-m", "gradwire")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradwire {gradwire.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "example"), [(["--help"], "gradwire demo --hooks fp16 bf16"), (["demo", "-h"], "--json")]
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
        (["demo", "--nproc", "0"], "nproc must be between 1 and 64, got 0"),
        (["demo", "--nproc", "two"], "invalid int value: 'two'"),
        (["demo", "--steps", "0"], "steps must be at least 1, got 0"),
        (["demo", "--steps", "-3"], "steps must be at least 1, got -3"),
        (["demo", "--seed", "-1"], "seed must be between 0"),
        (["demo", "--hooks"], "expected at least one argument"),
        (["demo", "--hooks", "fp61"], "unknown hook 'fp61'. Did you mean 'fp16'? Available: "),
        (["demo", "--hooks", "fp16:acumulate=wire"], "fp16: unknown option 'acumulate'"),
        (["demo", "--hooks", "fp16:accumulate=int"], "must be one of fp32, wire, got 'int'"),
        (["demo", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, argv, message):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_short_demo():
    command = (*GRADWIRE, "demo", "--steps", "4", "--nproc", "2", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    records = {record["hook"]: record for record in json.loads(done.stdout)["records"]}
    assert list(records) == ["plain", *gradwire.exchanges.EXCHANGES]
    plain, exact, noop, fp16 = (records[name] for name in ("plain", "exact", "noop", "fp16"))
    assert {record["steps"] for record in records.values()} == {4}
    assert {len(record["step_s"]) for record in records.values()} == {2}
    assert exact["sent_bytes"] == plain["sent_bytes"] == 4 * plain["params"]
    assert exact["loss"] == plain["loss"]
    assert noop["sent_bytes"] == 0
    assert fp16["sent_bytes"] == pytest.approx(plain["sent_bytes"] / 2, rel=0.01)
    assert plain["gradient_error"] < 1e-6 < fp16["gradient_error"] < 1e-2 < noop["gradient_error"]
    assert [name for name, record in records.items() if not record["identical"]] == ["noop"]
    assert all(record["kept_promises"] for record in records.values())
    assert "starting 2 processes" in done.stderr


@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGINT, "training"), (signal.SIGTERM, "starting"), (signal.SIGKILL, "training")]
)
def test_an_interrupted_demo_leaves_nothing_behind(number, moment, tmp_path):
    command = (*GRADWIRE, "demo", "--steps", "60", "--hooks", "fp16")
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while moment not in demo.stderr.readline():
            assert demo.poll() is None
        ranks = children(demo.pid)
        assert len(ranks) == 2
        demo.send_signal(number)
        out, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert (demo.returncode, out) == (expected[number], "")
    assert err == ("gradwire: interrupted\n" if number == signal.SIGINT else "")
    for rank in ranks:
        wait_until_gone(rank)
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())


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
