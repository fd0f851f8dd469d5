"""For all tests."""

import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

# A suite that was started in the background of a shell would ignore Ctrl-C, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The server that ranks are forked from imports torch while pytest does, and not after it.
multiprocessing.set_forkserver_preload(["gradwire.testing.preload", "tests.kit.trial", "tests.kit.kernels"])
forkserver.ensure_running()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long begin first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True, scope="session")
def _pools() -> Iterator[None]:
    """No rank outlives the session."""
    from tests.kit.ranks import close_pools

    yield
    close_pools()


@pytest.fixture
def recorded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rehearsals every piece of work takes 10 us, as on an idle machine, however busy this one is."""
    monkeypatch.setattr("gradwire.tools.measure.rehearse._worked_s", lambda began, ended: 1e-5)
    monkeypatch.setattr("gradwire.tools.measure.rehearse.COLD_BYTES", 4096)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread, for tests whose ranks are threads already."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
