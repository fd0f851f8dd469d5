"""The Hook that register() returns, at work under DDP."""

from __future__ import annotations

import pytest

from .conftest import Case, Outcome
from .runner import cases

pytestmark = pytest.mark.timeout(450)


@pytest.mark.parametrize("ddp_case", cases("api"))
def test_hook(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)
