"""An asynchronous device on the CPU, for tests: device type `testdev`, backend `testccl`.

    from gradwire.testing import device

    device.load()
    dist.init_process_group("cpu:gloo,testdev:testccl")
    device.set_schedule("lazy")
    model = DistributedDataParallel(net.to("testdev"))

Work on a stream runs when the host synchronises, or earlier, as the schedule says. Whatever a program does not order
runs in an order that shows it: it reads values that are not there yet, or memory that has been overwritten.
`docs/test-device.md` says what the device models and what it does not. It is one device per process, and ranks must be
processes. Importing this module does nothing; `load` builds the device (once, about a minute) and registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from gradwire._torch.device import register_device_module
from gradwire._torch.distributed import new_gloo
from gradwire.errors import SpecError, unknown
from gradwire.testing.device import build
from gradwire.testing.device.build import NoCompilerError, missing_tools
from gradwire.testing.device.module import DeviceModule

__all__ = [
    "BACKEND",
    "DEVICE",
    "GROUP",
    "SCHEDULES",
    "Counters",
    "NoCompilerError",
    "advance_host",
    "capturing",
    "counters",
    "enqueue",
    "host_us",
    "load",
    "missing_tools",
    "reset_counters",
    "set_costs",
    "set_schedule",
]

DEVICE, BACKEND = "testdev", "testccl"
GROUP = f"cpu:gloo,{DEVICE}:{BACKEND}"
"""The backend to pass to `dist.init_process_group` and `dist.new_group`."""

SCHEDULES: Mapping[str, str] = {
    "lazy": "nothing runs until the host synchronises, and then only what that needs",
    "eager_sides": "side streams run at once, the default stream when it is needed",
    "lazy_sides": "the default stream runs at once, side streams when they are needed",
    "shuffled": "after every call a few tasks of a stream by chance, from a seed",
    "eager": "everything runs at once, as on a CPU",
}
"""When streams run, beyond what the program demands. Every schedule is one that a GPU could follow."""

_loaded: Any = None


@dataclass(frozen=True)
class Counters:
    """What has happened since `load` or `reset_counters`."""

    host_syncs: int
    """How often the host waited for the device: synchronize, item, copies to the host, results of unknown shape."""
    launches: int
    """Kernels and copies, without collectives."""
    collectives: int
    poisoned: int
    """Blocks of memory that were overwritten after they were freed."""
    reasons: Mapping[str, int]
    """The host synchronisations by what caused them."""


def load() -> None:
    """Build the device if needed, and register it with torch. Further calls do nothing.

    Raises:
        NoCompilerError: If it must be built and there is no C++ compiler.
    """
    global _loaded
    if _loaded is None:
        rename_privateuse1_backend(DEVICE)
        _loaded = build.module()
        register_device_module(DEVICE, DeviceModule(_loaded))
        generate_methods_for_privateuse1_backend(for_storage=True)
        dist.Backend.register_backend(BACKEND, _new_backend, extended_api=True, devices=[DEVICE])


def set_schedule(name: str, seed: int = 0) -> None:
    """Run what is queued, and follow this schedule from now on.

    Args:
        name: One of `SCHEDULES`.
        seed: For `shuffled`.
    """
    if name not in SCHEDULES:
        raise SpecError(unknown("schedule", name, SCHEDULES))
    _native().set_schedule(name, seed)


def counters() -> Counters:
    """What has happened so far. It synchronises nothing."""
    return Counters(**_native().counters(), reasons=_native().sync_reasons())


def reset_counters() -> None:
    """Count from zero again."""
    _native().reset_counters()


def enqueue(function: Callable[..., object], *tensors: Tensor) -> None:
    """Put `function` on the current stream as one launch.

    When it runs, it is called with CPU tensors that share the memory of `tensors`. They are not kept alive, as a kernel
    keeps nothing alive. What it raises surfaces at the next synchronisation of the host.
    """
    name = getattr(function, "__name__", type(function).__name__)
    _native().enqueue(function, list(tensors), name)


# -- simulated time --------------------------------------------------------------------------------------------------


def host_us() -> float:
    """The simulated time of the host, in microseconds: it moves when the host waits, and by `advance_host`."""
    return float(_native().host_us())


def advance_host(us: float) -> None:
    """Let the host be busy for so many simulated microseconds."""
    _native().advance_host(us)


def set_costs(
    *,
    launch_us: float = 5.0,
    bytes_per_us: float = 100e3,
    collective_us: float = 20.0,
    link_bytes_per_us: float = 10e3,
) -> None:
    """Set how long work that is enqueued from now on takes on the simulated clock.

    A kernel takes `launch_us`, and the bytes of its arguments and results divided by `bytes_per_us`; a collective takes
    `collective_us`, and its bytes divided by `link_bytes_per_us`, from when the last rank starts it.
    """
    _native().set_costs(launch_us, bytes_per_us, collective_us, link_bytes_per_us)


@contextmanager
def capturing() -> Iterator[None]:
    """Pretend that streams are being captured into a graph: see `torch.testdev.is_current_stream_capturing`."""
    _native().set_capturing(True)
    try:
        yield
    finally:
        _native().set_capturing(False)


def _native() -> Any:
    if _loaded is None:
        raise RuntimeError("the test device is not loaded: call gradwire.testing.device.load() first")
    return _loaded


def _new_backend(options: Any, _: object) -> Any:
    inner = new_gloo(options.store, options.group_rank, options.group_size, (), 2, options.timeout)
    return _native().Backend(inner, options.group_id)
