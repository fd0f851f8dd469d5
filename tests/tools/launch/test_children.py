"""A script that starts its other ranks as processes of its own, as Lightning does, and one of them fails."""

import pytest

from gradwire.tools.cli import main

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


@pytest.fixture
def run(tmp_path, capfd, forked_ranks):
    """The exit code of `gradwire run` and what stands on stderr, if one of the ranks fails."""

    def run(failing):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT)
        code = main(["run", "--hook", "fp16", str(path), str(tmp_path / "store"), failing])
        return code, capfd.readouterr().err

    return run


def test_the_error_of_a_rank_that_the_script_started_is_reported_with_one_traceback(run):
    code, err = run(failing="1")
    assert code == 1
    assert err.count("Traceback (most recent call last):") == 1
    assert err.endswith("gradwire: error: rank 1 failed, see above: ValueError: this rank has a problem\n")


@pytest.mark.thorough
def test_a_rank_that_the_script_started_and_that_only_lost_another_rank_prints_nothing(run):
    code, err = run(failing="0")
    assert code == 1
    assert err.startswith("gradwire: error: rank 0 failed:\nTraceback (most recent call last):\n")
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: this rank has a problem\n")
