"""Hook state in checkpoints."""

from __future__ import annotations

import pytest

from .conftest import Case, Outcome
from .runner import cases

pytestmark = pytest.mark.timeout(450)


@pytest.mark.parametrize("ddp_case", cases("state"))
def test_state(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)
