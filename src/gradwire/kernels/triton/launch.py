"""How a Triton kernel is started: one function for all kernels and devices, and what happens if it fails."""

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Launcher = Callable[[Callable[..., None], tuple[Tensor, ...]], None]
"""Calls a function with tensors, in the order of the device's current stream."""

LAUNCHERS: dict[str, Launcher] = {}
"""By type of device: how kernels are started where calling them directly is not right."""

failed: list[str] = []
"""Why the torch kernels are used instead, once a kernel has failed in this process."""

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("gradwire")


def launch(
    kernel: Any, programs: int, tensors: tuple[Tensor, ...], *numbers: float, warps: int, **constants: Any
) -> None:
    """Start `programs` programs of a kernel on the current stream of the device that holds the tensors.

    Args:
        kernel: A function of `gradwire.kernels.triton.passes`.
        programs: The size of the grid. With 0 nothing happens.
        tensors: The first arguments of the kernel.
        numbers: Its other arguments.
        warps: The number of warps per program.
        constants: Its compile-time constants.
    """

    def start(*here: Tensor) -> None:
        kernel[(programs,)](*here, *numbers, **constants, num_warps=warps, enable_fp_fusion=False)

    if programs == 0:
        return
    device = tensors[0].device
    if (launcher := LAUNCHERS.get(device.type)) is not None:
        launcher(start, tensors)
    elif device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            start(*tensors)
    else:
        start(*tensors)


def give_up(error: Exception) -> None:
    """Use the torch kernels from now on, and say so once.

    Both sets of kernels make the same bits, so ranks that use different ones still agree, and no collective depends on
    the choice.
    """
    if not failed:
        reason = next(iter(str(error).splitlines()), "")
        failed.append(f"{type(error).__name__}: {reason}")
        log.warning(
            "a Triton kernel cannot run here (%s): gradwire uses its torch kernels from now on, which give the same "
            "results but need several times the memory traffic",
            failed[0],
        )


def or_torch(module: ModuleType) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: if a kernel does not compile or start, call the function of the same name in `module` instead."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        instead: Callable[P, T] = getattr(module, function.__name__)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not failed:
                try:
                    return function(*args, **kwargs)
                except Exception as error:  # nothing was written: a launch fails before it starts
                    give_up(error)
            return instead(*args, **kwargs)

        return call

    return decorate
