"""For tests of the verbs."""

import pytest

from gradwire.tools.launch.supervise import Command

from ..kit import forked


@pytest.fixture
def forked_ranks(monkeypatch):
    """The ranks that a verb starts are forked: see `tests/kit/forked.py`."""
    monkeypatch.setattr(Command, "start", forked.start)
