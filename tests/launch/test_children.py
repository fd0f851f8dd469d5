"""A script that starts its other ranks as processes of its own, as Lightning does, and one of them fails."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, subprocess, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ.get("LOCAL_RANK", 0))
if rank == 0:
    child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
if rank == int(sys.argv[2]):
    raise ValueError("this rank has a problem")
model(torch.randn(2, 8)).sum().backward()
"""


def run(folder, failing):
    path = folder / "train.py"
    path.write_text(SCRIPT)
    words = (sys.executable, "-m", "gradwire", "run", "--hook", "fp16", str(path), str(folder / "store"), failing)
    return subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)


def test_the_error_of_such_a_rank_is_told_and_its_traceback_comes_once(tmp_path):
    done = run(tmp_path, failing="1")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last):") == 1
    assert done.stderr.endswith("gradwire: error: rank 1 failed, see above: ValueError: this rank has a problem\n")


@pytest.mark.thorough
def test_such_a_rank_that_only_lost_another_says_nothing(tmp_path):
    done = run(tmp_path, failing="0")
    assert done.returncode == 1
    assert done.stderr.startswith("gradwire: error: rank 0 failed:\nTraceback (most recent call last):\n")
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("ValueError: this rank has a problem\n")
