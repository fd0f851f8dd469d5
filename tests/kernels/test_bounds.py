"""Bytes that are no wire are refused or decoded, whatever they are; see `bounds.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire import kernels

from . import bounds


def test_bytes_that_are_no_wire_are_refused_or_decoded() -> None:
    kernels.load()
    outcomes = bounds.with_both(200)
    assert outcomes["refused"] > 50
    assert outcomes["decoded"] > 50


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.timeout(1800)  # it compiles every kernel again
def test_no_kernel_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    """In a process of its own, which compiles all kernels again with bounds checks."""
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.bounds", os.environ.get("GRADWIRE_FUZZ_EXAMPLES", "500")]
    done = subprocess.run(command, env={**os.environ, **checks}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
