"""For all tests."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

# A suite that was started in the background of a shell would ignore Ctrl-C, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

multiprocessing.set_forkserver_preload(["gradwire.testing.preload", "tests.kit.trial", "tests.kit.kernels"])


def pytest_configure(config: pytest.Config) -> None:
    """The server that ranks are forked from imports torch while pytest does, and not after it.

    What ranks print is shown with the test that fails, as the server has the output that pytest captures.
    """
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):  # else workers run the tests
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        forkserver.ensure_running()
        capture.suspend_global_capture()


@pytest.hookimpl(trylast=True)  # when the tests that do not run are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long begin first: pytest-xdist gives each worker a part of this list, and its share of them."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    short = [item for item in items if not item.get_closest_marker("long")]
    parts: list[pytest.Item] = []
    for worker in range(workers):
        first, size = long[worker::workers], (len(items) - len(parts)) // (workers - worker)
        rest = max(0, size - len(first))
        parts += first + short[:rest]
        del short[:rest]
    items[:] = parts + short


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
