"""DDP itself in all its modes, on real processes, for every hook."""

from __future__ import annotations

import pytest

from .conftest import Case
from .runner import cases

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("ddp_case", cases("modes"), ids=lambda case: "-".join(map(str, case)))
def test_mode(ddp_case: Case, outcome) -> None:
    outcome(ddp_case)
