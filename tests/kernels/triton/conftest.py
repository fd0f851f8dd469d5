"""Triton kernels in the interpreter, which must be chosen before triton is imported, and torch imports it with dynamo.

So `make triton` runs this folder in processes of its own, with TRITON_INTERPRET=1. Others do not collect it.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from gradwire.testing import interpreter

    interpreter.load()

    from gradwire import kernels
    from gradwire.kernels.triton import calls, launch
else:
    collect_ignore_glob = ["test_*.py"]


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
