"""The browser for tests of pages."""

import pytest

from .browser import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One browser for all tests."""
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()
