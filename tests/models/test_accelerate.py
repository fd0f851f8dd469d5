"""Accelerate's FSDP2, which `make integrations` installs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ..kit.versions import sharded_models

pytestmark = [pytest.mark.integrations, sharded_models]
SCRIPT = Path(__file__).with_name("accelerate_fsdp2.py")


def test_a_model_that_accelerate_has_sharded_takes_a_hook() -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.fail("not installed: accelerate; `make integrations` installs what this test needs")
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT))
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("int8, gather=bf16: ") == 2
    assert "4 steps on every rank" in done.stdout
