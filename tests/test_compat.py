"""`make compat`: the requirements that it installs, and the summary of a run."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "compat.py"


@pytest.fixture(scope="module")
def compat() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compat", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("output", "summary"),
    [
        ("....\n3297 passed, 12 deselected in 540.01s (0:09:00)\n", "2.15.0: 3297 passed, 0 failed"),
        ("F...\n2 failed, 3295 passed in 540.01s\n[gloo] a last word\n", "2.15.0: 3295 passed, 2 failed"),
        ("1 failed, 1 passed, 2 errors in 1.00s\n", "2.15.0: 1 passed, 1 failed, 2 error"),
        ("3700 passed, 43 skipped in 540.01s\n", "2.15.0: 3700 passed, 0 failed, 43 skipped"),
        ("1 error in 0.10s\n", "2.15.0: 0 passed, 0 failed, 1 error"),
        ("Fatal Python error: Aborted\n", "2.15.0: no result"),
    ],
)
def test_summary(compat: ModuleType, output: str, summary: str) -> None:
    assert compat.summary("2.15.0", output) == summary


def test_requirements_are_the_pinned_ones_that_tests_need(compat: ModuleType) -> None:
    found = compat.requirements()
    assert all("==" in line for line in found)
    assert {"pytest", "numpy", "numba"} <= {line.split("==")[0] for line in found}
    assert not {"mypy", "ruff", "pre-commit"} & {line.split("==")[0] for line in found}
