"""Ranks as processes: results, failures, what a rank finds around it, and what is left behind."""

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gradwire.testing import RankFailed, RankPool, spawn_ranks
from gradwire.testing import processes as kit
from gradwire.testing.processes import when_all_returned

from ..kit.forked import run_programs


@pytest.fixture
def pool():
    made = RankPool(2)
    yield made
    made.close()


def sum_of_ranks(rank, size, *values):
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return rank, size, total, values, os.getpid()


def test_results_are_in_order():
    assert [
        (rank, size, float(total), values) for rank, size, total, values, _ in spawn_ranks(3, sum_of_ranks, "a")
    ] == [(rank, 3, 3.0, ("a",)) for rank in range(3)]


def test_pool_keeps_its_processes(pool):
    first, second = (pool.run(sum_of_ranks) for _ in range(2))
    assert [result[-1] for result in first] == [result[-1] for result in second]
    assert len({result[-1] for result in first} | {os.getpid()}) == 3


def fail_on_one(rank, size):
    if rank == 1:
        raise ValueError("this rank has a problem")
    return rank


def test_traceback_of_a_rank_comes_back(pool):
    for run in (pool.run, lambda *args: spawn_ranks(2, *args)):
        with pytest.raises(RankFailed, match=r"(?s)^rank 1: \nTraceback.*in fail_on_one.*ValueError: this rank has a"):
            run(fail_on_one)


def return_what_has_no_pickle(rank, size):
    return lambda: None


def test_result_without_a_pickle_is_a_failure(pool):
    with pytest.raises(RankFailed, match=r"(?s)rank 0: .*pickle.*rank 1: .*pickle"):
        pool.run(return_what_has_no_pickle)


def test_function_without_a_pickle_is_refused(pool):
    with pytest.raises(Exception, match="pickle"):
        pool.run(lambda rank, size: None)


def end(rank, size, how):
    if rank == 1 and how == "exit code":
        os._exit(3)
    if rank == 1 and how == "SystemExit":
        raise SystemExit(4)
    if rank == 1 and how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit code", "^rank 1: died with exit code 3$"),
        ("signal", "^rank 1: died with exit code -9$"),
        ("SystemExit", "(?s)^rank 1: .*SystemExit: 4"),
    ],
)
def test_rank_that_ends_fails_and_the_pool_starts_again(pool, how, text):
    before = {result[-1] for result in pool.run(sum_of_ranks)}
    with pytest.raises(RankFailed, match=text):
        pool.run(end, how)
    assert not before & {result[-1] for result in pool.run(sum_of_ranks)}


def test_rank_that_died_between_two_calls(pool, monkeypatch):
    monkeypatch.setattr(kit, "GRACE_S", 0.5)
    os.kill(pool.run(sum_of_ranks)[1][-1], signal.SIGKILL)
    pool._processes[1].join()
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9"):
        pool.run(sum_of_ranks)
    assert len(pool.run(sum_of_ranks)) == 2


def hang(rank, size, folder):
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(3600)


def wait_for_the_other(rank, size):
    if rank == 1:
        raise ValueError("this rank has a problem")
    dist.barrier()


def gone(pid):
    """Whether a process has ended; one that its parent has not yet waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid):
    while not gone(pid):
        time.sleep(0.01)


def test_rank_that_hangs_is_ended(pool, tmp_path):
    with pytest.raises(RankFailed, match=r"^rank 1: no result in time$"):
        pool.run(hang, tmp_path, timeout_s=5.0)
    for rank in range(2):
        wait_until_gone(int(Path(tmp_path, str(rank)).read_text()))


def test_rank_that_waits_for_one_that_failed_is_ended(pool, monkeypatch):
    monkeypatch.setattr(kit, "GRACE_S", 0.5)
    with pytest.raises(RankFailed, match=r"(?s)^rank 0: .*rank 1: .*ValueError: this rank has a problem"):
        pool.run(wait_for_the_other)


def surroundings(rank, size):
    """What a rank finds; and what it leaves behind in its process."""
    found = {
        "threads": torch.get_num_threads(),
        "torch": float(torch.rand(())),
        "python": random.random(),
        "numpy": float(np.random.rand()),
        "filters": [str(each) for each in warnings.filters],
        "environment": {**os.environ},
        "folder": os.getcwd(),
        "group": dist.group.WORLD.group_name,
        "debug": dist.get_debug_level().name,
    }
    torch.set_num_threads(2)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    warnings.simplefilter("error")
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    dist.new_group([0])
    return found


def test_every_call_finds_what_a_new_process_would(pool, monkeypatch, tmp_path):
    first = pool.run(surroundings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOMETHING_NEW", "2")
    second = pool.run(surroundings)
    for rank, found in enumerate([*first, *second]):
        assert found["threads"] == 1
        assert found["filters"] == first[0]["filters"]
        assert "LEFT_BEHIND" not in found["environment"]
        assert found["environment"]["RANK"] == found["environment"]["LOCAL_RANK"] == str(rank % 2)
        assert found["environment"]["WORLD_SIZE"] == "2"
    for generator in ("torch", "python", "numpy"):
        assert [found[generator] for found in first] == [found[generator] for found in second]
        assert first[0][generator] != first[1][generator]
    for found in second:
        assert found["folder"] == str(tmp_path)
        assert found["environment"]["SOMETHING_NEW"] == "2"


def train_in_threads(rank, size):
    """Parallel loops and autograd's threads, which a process that was forked carelessly cannot start."""
    torch.set_num_threads(2)
    weight = torch.randn(400, 400, requires_grad=True)
    (weight @ weight).square().sum().backward()
    return bool(weight.grad.isfinite().all())


def test_torch_can_use_threads_in_a_rank(pool):
    assert pool.run(train_in_threads) == [True, True]


def leave_a_note(rank, size, folder):
    when_all_returned(lambda: Path(folder, f"{rank} left").touch())
    if rank == 0:
        Path(folder, "0 returned").touch()
        return
    while not Path(folder, "0 returned").exists():
        time.sleep(0.01)
    assert not Path(folder, "0 left").exists()
    assert dist.is_initialized()


def notes_of(rank, size, folder):
    return Path(folder, f"{rank} left").exists()


def test_ranks_leave_when_all_have_returned(pool, tmp_path):
    pool.run(leave_a_note, tmp_path)
    assert pool.run(notes_of, tmp_path) == [True, True]


def destroy_the_world(rank, size):
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()


def test_every_call_has_a_world_of_its_own(pool):
    pool.run(destroy_the_world)
    assert float(pool.run(sum_of_ranks)[0][2]) == 1.0


ENDING = """
import os, signal, sys, threading
from pathlib import Path
from gradwire.testing import RankPool
from tests.testing.test_processes import hang, sum_of_ranks

if __name__ == "__main__":
    pool = RankPool(2)
    folder, ending = sys.argv[1:]
    for result in pool.run(sum_of_ranks):
        Path(folder, f"pool {result[0]}").write_text(str(result[-1]))
    if ending == "returns":
        sys.exit(0)
    if ending == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    pool.run(hang, folder)
"""


@pytest.mark.parametrize("ending", ["is killed", "is killed during a call"])
def test_no_rank_outlives_its_program(ending, tmp_path):
    program = Path(tmp_path, "program.py")
    program.write_text(ENDING)
    ((code, _, _),) = run_programs([str(program), str(tmp_path), ending])
    assert code == -signal.SIGKILL
    for rank in range(2):
        wait_until_gone(int(Path(tmp_path, f"pool {rank}").read_text()))


@pytest.mark.long
def test_no_rank_outlives_a_program_with_a_server_of_its_own(tmp_path):
    program = Path(tmp_path, "program.py")
    program.write_text(ENDING)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(program), str(tmp_path), "returns"], env=environment, timeout=540)
    assert done.returncode == 0
    for rank in range(2):
        wait_until_gone(int(Path(tmp_path, f"pool {rank}").read_text()))
