"""DDP itself in all its modes, on real processes, for every hook."""

from __future__ import annotations

import pytest

from .conftest import Case, Outcome
from .runner import cases

pytestmark = pytest.mark.timeout(450)


@pytest.mark.parametrize("ddp_case", cases("modes"))
def test_mode(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)


@pytest.mark.parametrize("ddp_case", cases("groups"))
def test_who_takes_part(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)


@pytest.mark.parametrize("ddp_case", cases("compiled"))
def test_compiled(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)


@pytest.mark.parametrize("ddp_case", cases("reference"))
def test_as_torch_tests_its_own(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)


@pytest.mark.parametrize("ddp_case", cases("buckets"))
def test_buckets(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)
