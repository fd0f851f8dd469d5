"""Triton kernels on the CPU: in Triton's interpreter, chosen by an environment variable before triton is imported.

`make triton` runs this folder in a process of its own: nothing else may import triton with another setting.
"""

import inspect
import os
import threading

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import triton.language as tl
from triton.runtime import interpreter

from gradwire import kernels
from gradwire.kernels.triton import LAUNCHERS, calls, launch

_patch, _patched, _lock = interpreter._patch_lang, set(), threading.Lock()


class _Keep:
    """A patch that stays."""

    def restore(self):
        pass


def _patch_once(function):
    """The interpreter patches the language at each call of each function, which takes nine tenths of its time."""
    modules = [value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
    names = tuple(module.__name__ for module in modules)
    if names not in _patched:
        _patched.add(names)
        _patch(function)
    return _Keep()


interpreter._patch_lang = _patch_once


def start_alone(start, tensors):
    """The interpreter keeps the number of the program in a global variable, and ranks may be threads."""
    with _lock:
        start(*tensors)


@pytest.fixture(autouse=True)
def no_excuse(monkeypatch):
    """A kernel that fails fails the test, instead of leaving the work to the torch kernels."""

    def fail(error):
        raise error

    monkeypatch.setattr(launch, "give_up", fail)
    monkeypatch.setattr(calls, "give_up", fail)
    monkeypatch.setitem(LAUNCHERS, "cpu", start_alone)


@pytest.fixture
def both(monkeypatch):
    """Call a function with the Triton kernels, then with those in torch."""
    monkeypatch.setattr(kernels, "_numba", None)

    def call(function):
        results = []
        for devices in ({"cpu"}, set()):
            monkeypatch.setattr(kernels, "TRITON_DEVICES", devices)
            results.append(function())
        return results

    return call
