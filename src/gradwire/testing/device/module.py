"""The functions of `torch.testdev`: those of `torch.cuda` that torch and gradwire call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class DeviceModule(ModuleType):
    """What `torch.get_device_module("testdev")` returns. There is one device."""

    def __init__(self, native: Any) -> None:
        super().__init__("torch.testdev")
        self._native = native

    Event = staticmethod(lambda *args, **options: torch.Event("testdev", *args, **options))
    Stream = staticmethod(lambda *args, **options: torch.Stream(device="testdev"))

    def is_available(self) -> bool:
        """It is, once it is loaded."""
        return True

    def is_initialized(self) -> bool:
        """It is, once it is loaded."""
        return True

    def device_count(self) -> int:
        """One."""
        return 1

    def current_device(self) -> int:
        """The only one."""
        return 0

    def set_device(self, device: object) -> None:
        """There is one."""

    def device(self, device: object) -> torch.device:
        """A context in which tensors are made on the device."""
        return torch.device("testdev")

    def synchronize(self, device: object = None) -> None:
        """Run everything that is queued."""
        self._native.synchronize()

    def current_stream(self, device: object = None) -> torch.Stream:
        """The stream of this thread."""
        return torch.accelerator.current_stream()

    def set_stream(self, stream: torch.Stream) -> None:
        """Choose the stream of this thread."""
        torch.accelerator.set_stream(stream)

    def stream(self, stream: torch.Stream) -> torch.Stream:
        """A context in which `stream` is the current one."""
        return stream

    def is_current_stream_capturing(self) -> bool:
        """Whether a test pretends that it is: see `gradwire.testing.device.capturing`."""
        return bool(self._native.is_capturing())

    def manual_seed(self, seed: int) -> None:
        """The CPU's generator serves the device too."""

    def manual_seed_all(self, seed: int) -> None:
        """The CPU's generator serves the device too."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """That of the CPU."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """That of the CPU."""
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The types that `torch.autocast("testdev")` takes."""
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False
