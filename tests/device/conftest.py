"""These tests are marked `device`. Without a C++ compiler they fail in CI and are skipped elsewhere."""

from pathlib import Path

import pytest

from gradwire.testing.device import build

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.device)


@pytest.fixture(autouse=True, scope="session")
def _built() -> None:
    """The library is there before the ranks of a test need it, as building takes longer than a test may."""
    try:
        build.ensure()
    except SystemExit as error:
        pytest.fail(str(error))
    if not build.is_built():
        pytest.skip(build.missing_tools())
