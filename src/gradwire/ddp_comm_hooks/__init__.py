"""Drop-in for `torch.distributed.algorithms.ddp_comm_hooks`: the same names, working on every backend.

    from gradwire.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook

To migrate, change that one import. The differences are deliberate: `state=None` means the model's own process group
wherever the model is known, a registration returns the `gradwire.Hook`, and there is no deadlock on gloo.
"""

from collections.abc import Mapping
from enum import Enum, member
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp_comm_hooks import debugging_hooks as debugging
from gradwire.ddp_comm_hooks import default_hooks as default
from gradwire.ddp_comm_hooks import optimizer_overlap_hooks as optimizer_overlap  # noqa: F401 - torch's short name
from gradwire.ddp_comm_hooks import post_localSGD_hook as post_localSGD
from gradwire.ddp_comm_hooks import powerSGD_hook as powerSGD
from gradwire.ddp_comm_hooks import quantization_hooks as quantization
from gradwire.ddp_comm_hooks._group import EXACT, TORCH
from gradwire.engine.hook import Hook
from gradwire.exchanges import Exchange, LowRank, Noop
from gradwire.models.ddp import attach

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]

_EXCHANGES: Mapping[Any, Exchange] = {
    default.allreduce_hook: EXACT,
    default.fp16_compress_hook: default.HALF[torch.float16],
    default.bf16_compress_hook: default.HALF[torch.bfloat16],
    quantization.quantization_pertensor_hook: quantization.PER_TENSOR,
    quantization.quantization_perchannel_hook: quantization.PER_CHANNEL,
    debugging.noop_hook: Noop(),
}


def _ddp_comm_hook_wrapper(comm_hook: Any, model: DistributedDataParallel, state: Any = None) -> Hook:
    """Register one of this package's hooks on a model, over the process group `state` or the model's own."""
    return attach(model, _EXCHANGES[comm_hook], group=state)


def _powerSGD_comm_hook_wrapper(
    comm_hook: Any,
    model: DistributedDataParallel,
    state: Any,
    matrix_approximation_rank: int,
    start_powerSGD_iter: int = 1_000,
) -> Hook:
    """Register PowerSGD on a model, over the process group `state` or the model's own, with state by parameter name."""
    batched = comm_hook is powerSGD.batched_powerSGD_hook
    low_rank = LowRank(rank=matrix_approximation_rank, warmup=start_powerSGD_iter, batched=batched)
    return attach(model, low_rank, group=state)


def _plain(hook: Any) -> Any:
    return member(partial(_ddp_comm_hook_wrapper, comm_hook=hook))


def _power_sgd(hook: Any, rank: int) -> Any:
    return member(partial(_powerSGD_comm_hook_wrapper, comm_hook=hook, matrix_approximation_rank=rank))


class DDPCommHookType(Enum):
    """The hooks by name: `DDPCommHookType.FP16_COMPRESS.value(model=model, state=process_group)`."""

    ALLREDUCE = _plain(default.allreduce_hook)
    FP16_COMPRESS = _plain(default.fp16_compress_hook)
    BF16_COMPRESS = _plain(default.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _plain(quantization.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _plain(quantization.quantization_perchannel_hook)
    POWER_SGD = _power_sgd(powerSGD.powerSGD_hook, 1)
    POWER_SGD_RANK2 = _power_sgd(powerSGD.powerSGD_hook, 2)
    BATCHED_POWER_SGD = _power_sgd(powerSGD.batched_powerSGD_hook, 1)
    BATCHED_POWER_SGD_RANK2 = _power_sgd(powerSGD.batched_powerSGD_hook, 2)
    NOOP = _plain(debugging.noop_hook)


def register_ddp_comm_hook(comm_hook_type: Any, model: DistributedDataParallel, state: Any = None) -> Hook:
    """Register a hook by its type.

    Args:
        comm_hook_type: A member of this package's `DDPCommHookType`.
        model: The DDP model. It must have no hook yet.
        state: The process group to average over; None is the model's own.

    Returns:
        The hook, as from `gradwire.register`.

    Raises:
        TypeError: `comm_hook_type` is something else, for instance a member of torch's own enumeration.
    """
    if type(comm_hook_type).__module__ == TORCH:
        raise TypeError(
            f"that is torch's {comm_hook_type}; import DDPCommHookType from gradwire.ddp_comm_hooks, where "
            f"register_ddp_comm_hook comes from"
        )
    if not isinstance(comm_hook_type, DDPCommHookType):
        names = ", ".join(f"DDPCommHookType.{kind.name}" for kind in DDPCommHookType)
        raise TypeError(f"comm_hook_type must be one of {names}, got {comm_hook_type!r}")
    return comm_hook_type.value(model=model, state=state)  # type: ignore[no-any-return]


# torch.load with its defaults must accept a checkpoint with hooks and states before either is used in this process, so
# this cannot wait for a call. It is the only thing that importing this package changes.
torch.serialization.add_safe_globals(
    [
        *_EXCHANGES,
        powerSGD.PowerSGDState,
        powerSGD.powerSGD_hook,
        powerSGD.batched_powerSGD_hook,
        post_localSGD.PostLocalSGDState,
        post_localSGD.post_localSGD_hook,
    ]
)
