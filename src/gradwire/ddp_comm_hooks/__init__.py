"""Drop-in for `torch.distributed.algorithms.ddp_comm_hooks`: the same names, working on every backend.

    from gradwire.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook

Changing that one import is the migration. Differences, all deliberate: `state=None` means the model's own process group
wherever the model is known, a registration returns the `gradwire.Hook`, and nothing hangs on gloo.
"""

from enum import Enum, member
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp_comm_hooks import debugging_hooks as debugging
from gradwire.ddp_comm_hooks import default_hooks as default
from gradwire.ddp_comm_hooks import optimizer_overlap_hooks as optimizer_overlap  # noqa: F401 - torch's short name
from gradwire.ddp_comm_hooks import powerSGD_hook as powerSGD
from gradwire.ddp_comm_hooks import quantization_hooks as quantization
from gradwire.engine.hook import Hook
from gradwire.exchanges import LowRank, exchange
from gradwire.models.ddp import attach

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]

TORCH = "torch.distributed.algorithms.ddp_comm_hooks"


def _ddp_comm_hook_wrapper(comm_hook: Any, model: DistributedDataParallel, state: Any = None) -> Hook:
    """Register one of this package's hooks on a model, over `state` or else the model's own group."""
    return attach(model, exchange(comm_hook.spec), group=state)


def _powerSGD_comm_hook_wrapper(
    comm_hook: Any,
    model: DistributedDataParallel,
    state: Any,
    matrix_approximation_rank: int,
    start_powerSGD_iter: int = 1_000,
) -> Hook:
    """Register PowerSGD on a model, over `state` or else the model's own group, with state by parameter name."""
    batched = comm_hook is powerSGD.batched_powerSGD_hook
    made = LowRank(rank=matrix_approximation_rank, warmup=start_powerSGD_iter, batched=batched)
    return attach(model, made, group=state)


class DDPCommHookType(Enum):
    """The hooks by name: `DDPCommHookType.FP16_COMPRESS.value(model=model, state=process_group)`."""

    ALLREDUCE = member(partial(_ddp_comm_hook_wrapper, comm_hook=default.allreduce_hook))
    FP16_COMPRESS = member(partial(_ddp_comm_hook_wrapper, comm_hook=default.fp16_compress_hook))
    BF16_COMPRESS = member(partial(_ddp_comm_hook_wrapper, comm_hook=default.bf16_compress_hook))
    QUANTIZE_PER_TENSOR = member(partial(_ddp_comm_hook_wrapper, comm_hook=quantization.quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = member(partial(_ddp_comm_hook_wrapper, comm_hook=quantization.quantization_perchannel_hook))
    POWER_SGD = member(
        partial(_powerSGD_comm_hook_wrapper, comm_hook=powerSGD.powerSGD_hook, matrix_approximation_rank=1)
    )
    POWER_SGD_RANK2 = member(
        partial(_powerSGD_comm_hook_wrapper, comm_hook=powerSGD.powerSGD_hook, matrix_approximation_rank=2)
    )
    BATCHED_POWER_SGD = member(
        partial(_powerSGD_comm_hook_wrapper, comm_hook=powerSGD.batched_powerSGD_hook, matrix_approximation_rank=1)
    )
    BATCHED_POWER_SGD_RANK2 = member(
        partial(_powerSGD_comm_hook_wrapper, comm_hook=powerSGD.batched_powerSGD_hook, matrix_approximation_rank=2)
    )
    NOOP = member(partial(_ddp_comm_hook_wrapper, comm_hook=debugging.noop_hook))


def register_ddp_comm_hook(comm_hook_type: Any, model: DistributedDataParallel, state: Any = None) -> Hook:
    """Register a hook by its type. `state` is a process group, or None for the model's own."""
    if type(comm_hook_type).__module__ == TORCH:
        raise TypeError(
            f"that is torch's {comm_hook_type}; import DDPCommHookType from gradwire.ddp_comm_hooks, where "
            f"register_ddp_comm_hook comes from"
        )
    if not isinstance(comm_hook_type, DDPCommHookType):
        names = ", ".join(f"DDPCommHookType.{kind.name}" for kind in DDPCommHookType)
        raise TypeError(f"comm_hook_type must be one of {names}, got {comm_hook_type!r}")
    return comm_hook_type.value(model=model, state=state)
