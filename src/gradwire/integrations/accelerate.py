"""Accelerate: `prepare` in place of `accelerator.prepare`."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.errors import RegisterError
from gradwire.exchanges import Exchange
from gradwire.integrations.common import attach, load, require, save

__all__ = ["prepare"]

MINIMUM = "1.6"


def prepare(accelerator: Any, *objects: Any, hook: str | Exchange, **options: Any) -> tuple[Any, ...]:
    """`accelerator.prepare(...)`, and a hook for the model.

    `accelerator.save_state` and `load_state` keep the state of the hook from then on, in one file per rank.

    Args:
        accelerator: An `accelerate.Accelerator`, for DDP or with the FSDP2 plug-in.
        objects: What `accelerator.prepare` takes, with exactly one model.
        hook: The hook, as the `spec` of `gradwire.register`.
        options: Those of `gradwire.register`, such as `check_every` or, with FSDP2, `gather`, and of the spec.

    Returns:
        What `accelerator.prepare` returns, and the hook at the end.

    Raises:
        ImportError: If Accelerate is too old.
        RegisterError: If there is not exactly one model, with one process, with DeepSpeed, Megatron-LM or FSDP1, or if
            the model has a hook already, such as that of `DistributedDataParallelKwargs(comm_hook=...)`.

    Examples:
        >>> model, optimizer, data, hook = gradwire.integrations.accelerate.prepare(
        ...     accelerator, model, optimizer, data, hook="int8"
        ... )
    """
    require(MINIMUM, "accelerate")
    models = [index for index, given in enumerate(objects) if isinstance(given, nn.Module)]
    if len(models) != 1:
        raise RegisterError(f"prepare() takes exactly one model, got {len(models)}; call it once for each model")
    prepared = accelerator.prepare(*objects)
    prepared = (prepared,) if len(objects) == 1 else tuple(prepared)  # with FSDP2 it is a list
    optimizers = [made for made in prepared if isinstance(made, Optimizer)]
    made = attach("Accelerate", prepared[models[0]], hook, optimizers, options)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: save(made, folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: load(made, folder))
    return (*prepared, made)
