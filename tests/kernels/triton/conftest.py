"""Triton kernels in the interpreter, which must be chosen before triton is imported.

`make triton` runs this folder in processes of its own.
"""

from gradwire.testing import interpreter

interpreter.load()

import pytest  # noqa: E402

from gradwire import kernels  # noqa: E402
from gradwire.kernels.triton import calls, launch  # noqa: E402


@pytest.fixture(autouse=True)
def no_excuse(request, monkeypatch):
    """A kernel that fails fails the test, instead of leaving the work to the torch kernels."""

    def fail(error):
        raise error

    if "may_fail" not in request.fixturenames:
        monkeypatch.setattr(launch, "give_up", fail)
        monkeypatch.setattr(calls, "give_up", fail)


@pytest.fixture
def may_fail():
    """Afterwards the Triton kernels are in use again."""
    yield
    launch.failed.clear()


@pytest.fixture
def both(monkeypatch):
    """Call a function with the Triton kernels, then with those in torch."""
    monkeypatch.setattr(kernels, "_numba", None)

    def call(function):
        with interpreter.on("cpu"):
            first = function()
        return first, function()

    return call
