"""The browser that pages are shown in."""

import pytest

from .browser import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One for all pages."""
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()
