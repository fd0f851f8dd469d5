"""`gradwire run` on short scripts. Every start of ranks takes seconds, so each script looks at several things."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire.tools.cli import main

from ...kit.forked import Forked, run_gradwire, run_programs
from ...kit.versions import sharded_models
from .messages import is_short

GRADWIRE = (sys.executable, "-m", "gradwire")
HEAD = """
import os, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
"""

TRAIN = """
import copy, io
import gradwire, helper
dist.init_process_group("gloo")
class Mine(DistributedDataParallel): pass
models = [DistributedDataParallel(torch.nn.Linear(64, 64)), Mine(torch.nn.Linear(8, 8))]
for step in range(3):
    models[0](torch.randn(2, 64)).sum().backward()
models[1](torch.randn(2, 8)).sum().backward()
if dist.get_rank() == 0:
    hooks = [str(model._comm_hooks[0][1].hook.exchange) for model in models]
    print(__name__, sys.argv[1:], dist.get_world_size(), os.environ["LOCAL_RANK"], helper.NAME, *hooks)
assert os.path.isabs(__file__)
copied, file = copy.deepcopy(models[0]), io.BytesIO()
torch.save(copied, file)
file.seek(0)
saved = torch.load(file, weights_only=False)
for model in (copied, saved):
    model(torch.randn(2, 64)).sum().backward()
    try:
        gradwire.register(model, "bf16")
    except gradwire.RegisterError as error:
        assert "was copied or saved whole and has lost its hook; wrap its module" in str(error)
    else:
        raise AssertionError("the copy's hook slot is taken by a hook that is not there")
dist.destroy_process_group()
"""

SPAWN = """
def work(rank, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.randn(2, 64)).sum().backward()
    dist.destroy_process_group()
    globals()["kept"] = model  # alive when the process ends, which multiprocessing does without atexit
if __name__ == "__main__":
    spawned = torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=1, join=False)
    work(1, sys.argv[1])
    spawned.join()
    print("spawned")
"""

SHARDED = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
for step in range(3):
    model(torch.randn(2, 64)).sum().backward()
dist.destroy_process_group()
"""

OWN_HOOK = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
model.register_comm_hook(None, fp16_compress_hook)
"""

NO_DDP = """
model = torch.nn.Linear(8, 8)
model(torch.randn(2, 8)).sum().backward()
print("trained")
"""

FAILS_ON_ONE = """
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
if dist.get_rank() == 1:
    raise ValueError("this rank has a problem")
model(torch.randn(2, 8)).sum().backward()
"""

TRITONS = re.compile(r"nanobind: leaked.*refleaks\.html", re.DOTALL)
"""What Triton prints in a process that imported it with torch and was interrupted."""
WAITS = """
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(os.path.join(sys.argv[1], f"{os.getpid()}.pids"), "w").write(f"{os.getpid()} {child.pid}")
dist.barrier()
if dist.get_rank() == 0:
    time.sleep(1000)
model(torch.randn(2, 8)).sum().backward()
"""


def script(folder, text):
    path = folder / "train.py"
    path.write_text(HEAD + text)
    (folder / "helper.py").write_text("NAME = 'beside it'")
    return str(path)


@pytest.fixture
def run(capfd, forked_ranks):
    """Run a command line from this process, which has torch already; the ranks are forked."""

    def run(*words):
        code = main(["run", *words])
        return code, *capfd.readouterr()

    return run


def test_every_model_of_a_script_gets_the_hook(tmp_path, run):
    words = (
        "--hook",
        "fp16:accumulate=wire",
        "--json",
        "--nproc_per_node=2",
        script(tmp_path, TRAIN),
        "--json",
        "--nproc=9",
    )
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    printed, told = out.splitlines()
    hooks = "fp16:accumulate=wire fp16:accumulate=wire"
    assert printed == f"__main__ ['--json', '--nproc=9'] 2 0 beside it {hooks}"
    assert [model["total_steps"] for model in json.loads(told)["models"]] == [3, 1]


@pytest.mark.long
def test_ranks_that_the_script_spawns_get_it_too(tmp_path, run):
    metrics = tmp_path / "new" / "run.jsonl"
    words = ("--hook", "fp16", "--link", "1gbit", "--watch", "--metrics", str(metrics))
    code, out, err = run(*words, script(tmp_path, SPAWN), str(tmp_path / "store"))
    assert (code, out) == (0, "spawned\n"), err
    (record,) = map(json.loads, metrics.read_text().splitlines())
    assert (record["step"], record["hook"]) == (1, "fp16")
    assert err.count("gradwire run: step 1: fp16, ") == 1
    assert "gradwire run: fp16 averaged 1 step on 2 ranks" in err


def test_a_script_with_a_hook_of_its_own_is_told_why_not_and_once(tmp_path, run):
    path = script(tmp_path, OWN_HOOK)
    code, out, err = run("--hook", "fp16", "--nproc", "2", path)
    assert (code, out) == (1, "")
    assert "failed:\nTraceback (most recent call last):\n" in err
    assert f'  File "{path}", line ' in err
    assert "the script registers its own: fp16_compress_hook. Remove that line" in err
    assert err.count("Traceback") == 1
    assert "runpy" not in err


@sharded_models
def test_a_script_with_fully_shard_gets_its_hook_at_the_first_forward_pass(tmp_path, run):
    code, _, err = run("--hook", "int8", "--gather", "bf16", "--nproc", "2", script(tmp_path, SHARDED))
    assert code == 0, err
    assert "gradwire run: int8, gather=bf16 averaged 3 steps on 2 ranks; each rank sent" in err


def test_a_script_without_ddp_is_an_error(tmp_path, run):
    code, out, err = run("--hook", "fp16", script(tmp_path, NO_DDP))
    assert (code, out) == (1, "trained\n")
    assert err.startswith("gradwire: error: the script ended, but it never built a torch.nn.parallel.Dist")


@pytest.mark.long
def test_inside_torchrun_and_the_traceback_of_the_rank_that_failed_comes_once(tmp_path):
    torchrun = tmp_path / "torchrun.py"
    torchrun.write_text("from torch.distributed.run import main; main()")
    words = ("--nproc-per-node", "2", "-m", "gradwire.run", "--hook", "fp16", script(tmp_path, FAILS_ON_ONE))
    ((code, _, err),) = run_programs([str(torchrun), *words])
    assert code == 1
    assert err.count("ValueError: this rank has a problem") == 1


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    command = ("gradwire", "run", "--hook", "fp16", "--nproc", "2", script(tmp_path, WAITS), str(tmp_path))
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as to_out, err.open("w") as to_err:
        launcher = Forked(run_gradwire, command, os.environ, (to_out.fileno(), to_err.fileno()))
    try:
        while len(pids(tmp_path)) < 4:
            assert launcher.poll() is None, err.read_text()
            time.sleep(0.05)
        launcher.send_signal(signal.SIGINT)
        code = launcher.wait()
    finally:
        launcher.kill()
    assert (code, out.read_text(), TRITONS.sub("", err.read_text())) == (130, "", "gradwire: interrupted\n")
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.long
def test_a_killed_launcher_takes_torchrun_and_its_ranks_along(tmp_path):
    words = (*GRADWIRE, "run", "--hook", "fp16", "--nproc", "2", "--standalone", script(tmp_path, WAITS), str(tmp_path))
    launcher = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len(pids(tmp_path)) < 4:
            assert launcher.poll() is None
            time.sleep(0.05)
        torchrun = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[0])
        left = [torchrun, *(pid for pid in pids(tmp_path) if not is_sleep(pid))]
        launcher.kill()
        until = time.monotonic() + 60
        while any(map(alive, left)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(alive, left))
    finally:
        launcher.kill()
        for pid in filter(alive, pids(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def is_sleep(pid):
    """A child that the script has put into a session of its own: nobody is left to end it."""
    return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def pids(folder):
    return [int(word) for path in folder.glob("*.pids") for word in path.read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hook", "fp61", "SCRIPT"], "unknown hook 'fp61'. Did you mean 'fp16'?"),
        (["--hook", "fp16", "--link", "fast", "SCRIPT"], "link 'fast': the rate must be a number with"),
        (["--hook", "BF16", "SCRIPT"], "unknown hook 'BF16'. Did you mean 'bf16'?"),
        (["--hook", "fp16", "nosuch.py"], "script 'nosuch.py' does not exist"),
        (["--hook", "fp16", "--nproc", "2", "-m", "no.such.mod"], "-m no.such.mod: there is no module 'no'"),
        ([], "the following arguments are required: --hook, script (see"),
        (["--hook", "fp16", "--nproc", "0", "SCRIPT"], "the number of ranks must be between 1 and"),
        (["--hook", "fp16", "--nproc", "100000", "SCRIPT"], "the number of ranks must be between 1 and"),
        (["SCRIPT"], "the following arguments are required: --hook"),
        (["--hook", "fp16"], "the following arguments are required: script"),
    ],
)
def test_bad_input_has_a_short_message_and_nothing_starts(tmp_path, capsys, words, message):
    path = tmp_path / "train.py"
    path.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    assert main(["run", *(str(path) if word == "SCRIPT" else word for word in words)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert is_short(printed.err)
    assert printed.out == ""
    assert not (tmp_path / "started").exists()
    assert "GRADWIRE_PLAN" not in os.environ
