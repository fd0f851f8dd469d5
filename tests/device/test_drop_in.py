"""The drop-in hooks of `gradwire.ddp_comm_hooks` on the device: the same bits as on the CPU, under every schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.ddp_comm_hooks import (
    DDPCommHookType,
    ddp_zero_hook,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)

from ..kit.models import Deep, batch, seeded
from ..kit.ranks import Ranks
from ..kit.trial import loss
from .kit import on_device, same_bits, sgd, step, torch_kernels, weights, wrap

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer, as_functional_optim

TYPES = [kind.name for kind in DDPCommHookType if "POWER" not in kind.name]


def steps(ranks: Ranks, model: DDP, optimizer: Any = None, count: int = 3) -> dict[str, Tensor]:
    for number in range(count):
        if optimizer is not None:
            step(model, optimizer, ranks.rank, number)
        else:
            place = next(model.parameters()).device
            loss(model(batch(ranks.rank, number).to(place))).backward()
    return weights(model)


@on_device(2, specs=TYPES)
def test_hooks_by_type(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        ranks.hooks.append(register_ddp_comm_hook(DDPCommHookType[ranks.spec], model))
        return steps(ranks, model, sgd(model.parameters()))

    same_bits(ranks, run)


def by_function(ranks: Ranks, hook: Any, state: Callable[[], Any]) -> Callable[[str], dict[str, Tensor]]:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        model.register_comm_hook(state(), hook)
        return steps(ranks, model, sgd(model.parameters()))

    return run


@on_device(2)
def test_hooks_as_functions(ranks: Ranks) -> None:
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    for hook in (default_hooks.allreduce_hook, wrapped, quantization_hooks.quantization_pertensor_hook):
        same_bits(ranks, by_function(ranks, hook, lambda: ranks.group))


@on_device(2)
def test_power_sgd_states(ranks: Ranks) -> None:
    def state() -> Any:
        return powerSGD_hook.PowerSGDState(ranks.group, 1, start_powerSGD_iter=2, min_compression_rate=0.5)

    with torch_kernels():
        same_bits(ranks, by_function(ranks, powerSGD_hook.powerSGD_hook, state))


@on_device(4)
def test_post_local_sgd(ranks: Ranks) -> None:
    halves = [ranks.new_group([0, 1]), ranks.new_group([2, 3])]

    def state() -> Any:
        return post_localSGD_hook.PostLocalSGDState(ranks.group, halves[ranks.rank // 2], 1)

    same_bits(ranks, by_function(ranks, post_localSGD_hook.post_localSGD_hook, state))


@on_device(2)
def test_optimizer_in_a_hook(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        state = optimizer_overlap_hooks._OptimizerHookState(as_functional_optim(torch.optim.SGD, lr=0.05), None)
        hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
        model.register_comm_hook(ranks.group, hook)
        return steps(ranks, model)

    same_bits(ranks, run)


@on_device(2)
def test_zero_steps_in_backward(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place, seeded(Deep, 4), process_group=dist.group.WORLD)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05, momentum=0.9
        )
        hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, zero)
        model.register_comm_hook(None, hook)
        return steps(ranks, model, zero, 5)

    same_bits(ranks, run)
