"""Private names by which a device type outside of torch is made known to it."""

from types import ModuleType

import torch


def register_device_module(name: str, module: ModuleType) -> None:
    """Make `module` the functions of the device type: `torch.<name>` and `torch.get_device_module(name)`."""
    torch._register_device_module(name, module)
