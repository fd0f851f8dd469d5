"""What local training refuses when it is set up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch.optim import has_step_hooks
from gradwire.errors import RegisterError, SpecError


def check_model(model: object, optimizer: object) -> None:
    """A plain module and an optimizer whose steps can be counted."""
    if isinstance(model, DistributedDataParallel):
        raise RegisterError(
            "local training takes the plain module, whose gradients nobody averages; pass model.module if DDP is to "
            "average gradients within a sub-group as well"
        )
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        told = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise RegisterError(f"local training takes a torch.nn.Module and a torch.optim.Optimizer, got {told}")
    if not has_step_hooks(optimizer):
        raise RegisterError(f"{type(optimizer).__name__} has no step hooks to count by; pass the optimizer inside it")


def check_held(named: Sequence[tuple[str, Tensor]], optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must move something of the model."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not any(id(param) in held for _, param in named):
        raise RegisterError("the optimizer holds no parameter of the model: nothing would ever move")


def check_schedule(every: int, fragments: int, delay: int, tensors: int) -> None:
    """What the numbers may be; see `LocalSGD`."""
    for name, value in (("every", every), ("fragments", fragments)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"{name} must be a whole number of at least 1, got {value!r}")
    if fragments > min(every, tensors):
        raise SpecError(f"fragments must be at most every ({every}) and the parameters ({tensors}), got {fragments}")
    if not isinstance(delay, int) or not 0 <= delay < every:
        raise SpecError(f"delay must be a whole number from 0 to every - 1 ({every - 1}), got {delay!r}")
