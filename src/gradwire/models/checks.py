"""Checks before registration: what cannot carry a hook is refused, with the reason, before anything is made."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch.ddp import comm_hook_of
from gradwire._torch.distributed import backend_of
from gradwire.auto.settings import auto
from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges.bucket import GRADIENT_DTYPES
from gradwire.models.uncopied import LOST


def check_group(group: object) -> None:
    """Raise SpecError unless `group` is a process group or None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise SpecError(f"expected a process group that this rank is in, or None; got {group!r}")


def check_model(model: object, wanted: str) -> None:
    """Raise RegisterError unless `model` is a DDP model without a hook. `wanted` is the spec to register."""
    if not isinstance(model, DistributedDataParallel):
        raise RegisterError(
            f"register() takes a torch.nn.parallel.DistributedDataParallel, or a model with fully_shard (FSDP2); got "
            f"{type(model).__name__} without either; wrap the model first: model = DistributedDataParallel(model)"
        )
    if not dist.is_initialized():
        raise RegisterError("there is no process group: call torch.distributed.init_process_group() before registering")
    if (hooked := comm_hook_of(model)) is not None:
        function, state = hooked
        name = getattr(function, "__qualname__", "?")
        if name == "gradwire_hook":
            if not state.belongs_to(model):
                raise RegisterError(LOST)
            instead = (
                "to let gradwire choose, wrap the module in a new DistributedDataParallel"
                if auto(wanted) is not None
                else f"to change it use switch() of the Hook that register() returned, as in hook.switch({wanted!r})"
            )
            raise RegisterError(
                f"register_comm_hook can only be called once: this model already has the gradwire hook "
                f"{str(state.hook.exchange)!r}; {instead}"
            )
        raise RegisterError(
            f"register_comm_hook can only be called once: this model already has the hook {name!r}; wrap the module in "
            "a new DistributedDataParallel and register gradwire's there"
        )


def check_types(params: Sequence[tuple[str, Tensor]], what: str) -> None:
    """Raise RegisterError unless there are parameters, all of a type in which `what` can be averaged."""
    if not params:
        raise RegisterError("no parameter of the model requires a gradient: there is nothing to average")
    for name, param in params:
        if param.dtype not in GRADIENT_DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in GRADIENT_DTYPES)
            raise RegisterError(f"parameter {name!r} is {param.dtype}; {what} can be averaged in {allowed}")


def check_parameters(model: DistributedDataParallel, params: Sequence[tuple[str, Tensor]]) -> None:
    """Raise RegisterError unless there are parameters, of types and on a device that can be averaged."""
    check_types(params, "gradients")
    device = params[0][1].device
    try:
        backend_of(model.process_group, device)
    except RuntimeError as error:
        raise RegisterError(
            f"the model is on {device.type!r}, but its process group ({dist.get_backend(model.process_group)}) cannot "
            "move such tensors; use init_process_group('gloo') for a CPU model, or 'cpu:gloo,cuda:nccl'"
        ) from error
