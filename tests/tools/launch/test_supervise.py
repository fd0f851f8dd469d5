"""Processes without torch, which start in no time."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradwire.errors import SpecError
from gradwire.tools.launch import RunFailed, Script
from gradwire.tools.launch.launch import launch
from gradwire.tools.launch.plan import new_plan
from gradwire.tools.launch.supervise import Command, below, end_all, supervise


@pytest.fixture
def plan():
    with new_plan("run", "nowhere:nothing", {}) as plan:
        yield plan


def ranks(*programs):
    return [Command(f"rank {rank}", [sys.executable, "-c", text], os.environ) for rank, text in enumerate(programs)]


def note(plan, rank, text, *, echo, time_s, shown=False):
    content = {"who": f"rank {rank}", "traceback": text, "echo": echo, "shown": shown, "time_s": time_s}
    plan.write(plan.new_note("failed"), content)


def test_commands_that_all_succeed_raise_nothing(plan, capfd):
    supervise(ranks(*(f"import os; os.write(1, b'{word} ')" for word in ("one", "two"))), plan)
    assert sorted(capfd.readouterr().out.split()) == ["one", "two"]


@pytest.mark.parametrize(
    ("program", "text", "code"),
    [
        ("raise SystemExit(7)", "rank 1 ended with exit code 7", 7),
        ("import os; os.kill(os.getpid(), 11)", "rank 1 was killed by SIGSEGV", 139),
    ],
)
def test_the_exit_code_of_a_rank_is_kept_and_the_others_are_ended(plan, program, text, code):
    with pytest.raises(RunFailed) as caught:
        supervise(ranks("import time; time.sleep(1000)", program), plan)
    assert (str(caught.value), caught.value.exit_code) == (text, code)


def test_the_error_that_is_no_echo_is_told(plan):
    note(plan, 0, "connection closed", echo=True, time_s=1)
    note(plan, 1, "the cause", echo=False, time_s=2)
    note(plan, 2, "a later one", echo=False, time_s=3)
    with pytest.raises(RunFailed, match=r"^rank 1 failed:\nthe cause$"):
        supervise(ranks("raise SystemExit(1)"), plan)


def test_a_rank_that_dies_without_a_word_is_told_before_the_echoes_of_it(plan):
    note(plan, 0, "another rank failed", echo=True, time_s=1)
    with pytest.raises(RunFailed) as caught:
        supervise(ranks("raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"), plan)
    assert (str(caught.value), caught.value.exit_code) == ("rank 1 was killed by SIGKILL", 137)


def test_torchrun_is_not_blamed_for_its_ranks(plan):
    note(plan, 0, "another rank failed", echo=True, time_s=1)
    torchrun = Command("torchrun", [sys.executable, "-c", "raise SystemExit(1)"], os.environ)
    with pytest.raises(RunFailed, match=r"^rank 0 failed:\nanother rank failed$"):
        supervise([torchrun], plan)


def test_a_traceback_that_a_process_has_shown_itself_is_not_repeated(plan):
    note(plan, 1, "Traceback:\n  a line\nValueError: no", echo=False, time_s=1, shown=True)
    with pytest.raises(RunFailed, match=r"^rank 1 failed, see above: ValueError: no$"):
        supervise(ranks("raise SystemExit(1)"), plan)


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
open(sys.argv[1] + "/pids", "w").write(f"{os.getpid()} {own.pid} ")
time.sleep(1000)
"""


def test_ctrl_c_ends_those_that_will_not_hear_and_all_below_them(plan, tmp_path):
    words = [sys.executable, "-c", STUBBORN, str(tmp_path)]

    def interrupt():
        while len((tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        supervise([Command("rank 0", words, os.environ)], plan)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while any(map(alive, pids)):  # killed, but it takes a moment; the test's own time limit is the limit
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "ends_with"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_comes_while_they_are_ended_acts_when_they_are(plan, monkeypatch, number, ends_with):
    ended = []

    def end_all_late(roots, *rest):
        os.kill(os.getpid(), number)
        end_all(roots, *rest)
        ended.extend(root.poll() for root in roots)

    monkeypatch.setattr("gradwire.tools.launch.supervise.end_all", end_all_late)
    with pytest.raises(ends_with):
        supervise(ranks("import time; time.sleep(1000)"), plan, lambda: True)
    assert ended == [-signal.SIGTERM]


def alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_enough_ends_them_without_an_error(plan):
    asked = iter([False, False, True])
    supervise(ranks("import time; time.sleep(1000)"), plan, lambda: next(asked))


def test_below_finds_the_tree_and_not_its_neighbours():
    neighbour, root = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    try:
        assert [pid for pid, _ in below([root.pid])] == [root.pid]
        assert {root.pid, neighbour.pid} <= {pid for pid, _ in below([os.getpid()])}
    finally:
        for process in (neighbour, root):
            process.kill()
            process.wait()


def test_notes_are_whole_and_go_with_the_run():
    with new_plan("run", "nowhere:nothing", {"spec": "bf16"}) as plan:
        name = plan.new_note("model")
        plan.write(name, {"steps": 1})
        plan.write(name, {"steps": 2})
        plan.write(plan.new_note("failed"), 3)
        assert plan.read("model") == [{"steps": 2}]
    assert not Path(plan.folder).exists()
    plan.write(name, {"steps": 3})  # from a process that ends later
    assert plan.read("model") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.mod", "-m no.such.mod: there is no module 'no' in "),
        ("pkg.trian", "-m pkg.trian: there is no module 'pkg.trian'"),
        ("pkg.train.x", "there is no module 'pkg.train.x', as 'pkg.train' is no package"),
        ("pkg", "-m pkg: this is a package without __main__.py; name a module in it"),
        ("", "there is no module ''"),
        (".train", "there is no module ''"),
    ],
)
def test_a_module_that_cannot_run_is_refused_and_none_is_imported(tmp_path, monkeypatch, name, message):
    (tmp_path / "pkg" / "able").mkdir(parents=True)
    for file in ("__init__.py", "train.py", "able/__init__.py", "able/__main__.py"):
        (tmp_path / "pkg" / file).write_text("raise RuntimeError('this is for the ranks')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        Script.parse([name], module=True)
    assert message in str(caught.value)
    for able in ("pkg.train", "pkg.able", "timeit", "torch.distributed.run"):
        assert Script.parse([able, "--x"], module=True).words() == ["-m", able, "--x"]


def test_a_folder_is_a_script_if_python_can_run_it(tmp_path):
    with pytest.raises(SpecError, match=r"is a folder without __main__.py; give the path of a Python file in it"):
        Script.parse([str(tmp_path)])
    (tmp_path / "__main__.py").touch()
    assert Script.parse([str(tmp_path)]).words() == [str(tmp_path)]


def test_scripts_and_numbers_of_ranks_are_checked(tmp_path, plan):
    with pytest.raises(SpecError, match=r"script '.*nosuch.py' does not exist; give the path of a Python file"):
        Script.parse([str(tmp_path / "nosuch.py")])
    for nproc in (0, -1, 10**6):
        with pytest.raises(SpecError, match=f"the number of ranks must be between 1 and .*, got {nproc}"):
            launch(Script("train.py"), plan, nproc=nproc)
