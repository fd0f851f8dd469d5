"""The Triton kernels without a GPU: in Triton's interpreter, on the CPU or on the test device.

    from gradwire.testing import interpreter

    interpreter.load()                    # before anything imports triton, or with TRITON_INTERPRET=1 set
    with interpreter.on("cpu"):           # or "testdev"
        wire = codec.encode(values)       # by the Triton kernels

The interpreter runs one program of a kernel after the other with numpy, so it is slow: use small tensors. It computes
the bits that a GPU computes, because the kernels avoid everything that is approximate on a GPU. Importing this module
does nothing.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gradwire import kernels
from gradwire.errors import SpecError

_lock = threading.Lock()


def load() -> None:
    """Choose the interpreter for all Triton kernels of this process. Further calls do nothing.

    Raises:
        SpecError: If triton was imported before, without the interpreter.
        ImportError: If triton is not installed.
    """
    chosen = os.environ.get("TRITON_INTERPRET") == "1"
    if not chosen and "triton" in sys.modules:
        raise SpecError("triton is imported already, maybe by torch: set TRITON_INTERPRET=1 in the environment")
    os.environ["TRITON_INTERPRET"] = "1"
    _patch_the_language_once()


@contextmanager
def on(device_type: str) -> Iterator[None]:
    """Use the Triton kernels on devices of this type; on the CPU, instead of those of Numba."""
    from gradwire.kernels.triton import LAUNCHERS

    before = kernels.TRITON_DEVICES, kernels._numba
    LAUNCHERS[device_type] = _start_alone if device_type == "cpu" else _enqueue
    kernels.TRITON_DEVICES = kernels.TRITON_DEVICES | {device_type}
    if device_type == "cpu":
        kernels._numba = None
    try:
        yield
    finally:
        kernels.TRITON_DEVICES, kernels._numba = before
        del LAUNCHERS[device_type]


def _start_alone(start: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
    """The interpreter keeps the number of the program in a global variable, and ranks may be threads."""
    with _lock:
        start(*tensors)


def _enqueue(start: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
    """One launch on the current stream of the test device."""
    from gradwire.testing.device import enqueue

    enqueue(start, *tensors)


def _patch_the_language_once() -> None:
    """The interpreter patches the language at each call of each function, which takes nine tenths of its time."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()
    if patch.__module__ == __name__:
        return

    def patch_once(function: Any) -> Any:
        module = function.__module__
        if module not in patched:
            patched.add(module)
            patch(function)
        return _Lasting()

    interpreter._patch_lang = patch_once


class _Lasting:
    """A patch that is not taken back."""

    def restore(self) -> None:
        """Nothing to do."""
