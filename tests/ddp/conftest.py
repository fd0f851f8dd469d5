"""One spawn per number of ranks for all the checks of a test run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.testing import RankFailed, spawn_ranks

from .runner import Case, outcome_file, run_checks

SPAWN_TIMEOUT_S = 420.0

Outcome = Callable[[Case], None]


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Fails with the tracebacks of the ranks where a case failed. The first runs all of its size."""
    folder = tmp_path_factory.mktemp("ddp")
    wanted = _wanted(request.session.items)
    done: dict[int, dict[tuple[str, str], str]] = {}

    def look_up(case: Case) -> None:
        size, key, spec = case
        if size not in done:
            done[size] = _run(size, folder, wanted[size])
        text = done[size][key, spec]
        if text:
            pytest.fail(text, pytrace=False)

    return look_up


def _wanted(items: list[pytest.Item]) -> dict[int, list[tuple[str, str]]]:
    wanted: dict[int, list[tuple[str, str]]] = {}
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("ddp_case")
        if case:
            size, key, spec = case
            wanted.setdefault(size, []).append((key, spec))
    return wanted


def _run(size: int, folder: Path, wanted: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What the ranks wrote down for each check, together; also if some of them did not get to the end."""
    try:
        spawn_ranks(size, run_checks, str(folder), wanted, timeout_s=SPAWN_TIMEOUT_S)
        missing = "not reached, though the ranks ended well"
    except RankFailed as error:
        missing = f"not reached: {error}"
    told = [_read(outcome_file(folder, size, rank)) for rank in range(size)]
    return {pair: "\n".join(filter(None, (rank.get(pair, missing) for rank in told))) for pair in wanted}


def _read(path: Path) -> dict[tuple[str, str], str]:
    lines = path.read_text().splitlines() if path.exists() else ()
    return {(key, spec): text for key, spec, text in map(json.loads, lines)}
