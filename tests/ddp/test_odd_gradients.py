"""Gradients out of the ordinary, under DDP, for every hook."""

from __future__ import annotations

import pytest

from .conftest import Case, Outcome
from .runner import cases

pytestmark = pytest.mark.timeout(450)


@pytest.mark.parametrize("ddp_case", cases("odd"))
def test_odd_gradient(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)
