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
from .runner import cases, name

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("ddp_case", cases("failures"), ids=name)
def test_failure(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_dies_takes_the_others_along(guilty: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        spawn_ranks(3, lose_a_rank, str(tmp_path), guilty)
    assert str(caught.value) == f"rank {guilty}: died with exit code {EXIT_CODE}"
    survivors = {0, 1, 2} - {guilty}
    assert {int(path.stem) for path in tmp_path.glob("*.txt")} == survivors
    for rank in survivors:
        assert "another rank failed" in Path(tmp_path, f"{rank}.txt").read_text()


@pytest.mark.parametrize(("ending", "code"), [("nothing", 0), ("destroy", 0), ("in flight", 0), ("raise", 5)])
def test_a_program_that_forgets_to_close(ending: str, code: int, tmp_path: Path) -> None:
    """It ends by itself, with its own exit code, and has nothing to say."""
    command = [sys.executable, "-W", "error", forgetful.__file__]
    programs = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [program.communicate(timeout=100)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [code, code], said
    assert said == ["", ""]
