"""Faults on real processes. `make faults` strikes 1,200 times; these are 20 of every kind and subject."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.testing.faults import KINDS, Fault, Outcome, Report, strike

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import faults as campaign

TRIALS = list(campaign.faults(20, seed=2026))


@pytest.mark.parametrize("fault", TRIALS, ids=str)
def test_the_others_notice_and_say_why(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """How soon they notice is measured by `make faults`: here other tests run at the same time."""
    monkeypatch.setattr("gradwire.testing.faults.GRACE_S", 30.0)
    assert not strike(fault).problems()


def test_the_trials_are_of_every_kind_and_subject() -> None:
    assert {fault.kind for fault in TRIALS} == set(KINDS)
    assert {fault.subject for fault in TRIALS} == set(campaign.SUBJECTS)


FAULT = Fault("kill", "backward", 2, 0.0, 1, 3, "ddp int8")
GOOD = {rank: Report(rank, "another rank failed (rank 1 left no message)", 101.0) for rank in (0, 2)}


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(FAULT, 100.0, GOOD, [2]), "rank 2 hung"),
        (Outcome(FAULT, None, GOOD), "did not come to the fault"),
        (Outcome(FAULT, 90.0, GOOD), "needed 11.0 s, at most 5.0"),
        (Outcome(FAULT, 100.0, {0: replace(GOOD[0], text="connection closed by peer")}), "does not say 'rank 1'"),
        (Outcome(FAULT, 100.0, {0: replace(GOOD[0], threads=("gradwire-0",))}), "left the thread gradwire-0"),
    ],
)
def test_bad_outcomes_are_problems(outcome: Outcome, problem: str) -> None:
    assert any(problem in found for found in outcome.problems())
    assert not Outcome(FAULT, 100.0, GOOD).problems()
