"""Errors reach everybody, nobody waits for ever, and programs end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.testing import RankFailed, spawn_ranks

from . import forgetful
from .conftest import Case, Outcome
from .dying import EXIT_CODE, lose_a_rank
from .runner import cases

pytestmark = pytest.mark.timeout(450)


@pytest.mark.parametrize("ddp_case", cases("failures"))
def test_failure(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)


@pytest.mark.parametrize(("size", "guilty"), [(2, 0), pytest.param(3, 1, marks=pytest.mark.thorough)])
def test_a_rank_that_dies_takes_the_others_along(size: int, guilty: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        spawn_ranks(size, lose_a_rank, str(tmp_path), guilty, timeout_s=200.0)
    assert str(caught.value) == f"rank {guilty}: died with exit code {EXIT_CODE}"
    survivors = set(range(size)) - {guilty}
    assert {int(path.stem) for path in tmp_path.glob("*.txt")} == survivors
    for rank in survivors:
        assert "another rank failed" in Path(tmp_path, f"{rank}.txt").read_text()


@pytest.mark.parametrize("endings", [("nothing", "destroy"), ("raise", "in flight")], ids=" and ".join)
def test_programs_that_forget_to_close(endings: tuple[str, str], tmp_path: Path) -> None:
    """They end by themselves, with their own exit code, and have nothing to say."""
    command = [sys.executable, "-W", "error", forgetful.__file__]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    programs = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "store"), ending], **pipes)
        for rank, ending in enumerate(endings)
    ]
    try:
        said = [program.communicate(timeout=200)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [forgetful.EXIT_CODES[ending] for ending in endings], said
    assert said == ["", ""]
