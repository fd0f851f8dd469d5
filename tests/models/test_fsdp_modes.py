"""Every mode of FSDP2: `exact` gives the bits of plain FSDP2, and a codec gives its error and passes `verify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from gradwire.models import fsdp

from ..kit import models
from ..kit.models import WIDTH, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import Step, backward, error, mesh_of, same, shard, train, units, weights
from ..kit.versions import sharded_models

pytestmark = sharded_models

Build = Callable[[Any], Any]


@dataclass(frozen=True)
class Mode:
    """How a model is built on a mesh, and how a step of it runs."""

    build: Build
    step: Step = backward
    options: dict[str, Any] = field(default_factory=dict)


def deep(**options: Any) -> Build:
    return lambda mesh: shard(seeded(models.Deep), mesh, **options)


def after(change: Callable[[Any], object], build: Build | None = None) -> Build:
    def made(mesh: Any) -> Any:
        model = (build or deep())(mesh)
        for unit in units(model):
            change(unit)
        return model

    return made


def accumulate(model: Any, rank: int, step: int) -> None:
    """Two batches, of which only the second one communicates."""
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    backward(model, rank, 10 * step)
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    backward(model, rank, 10 * step + 1)


def accumulate_unsharded(model: Any, rank: int, step: int) -> None:
    """The same, with the parameters kept between the batches."""
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    backward(model, rank, 10 * step)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    backward(model, rank, 10 * step + 1)


def twice(model: Any, rank: int, step: int) -> None:
    """Two batches that both communicate; FSDP2 adds up the sharded gradients."""
    backward(model, rank, 10 * step)
    backward(model, rank, 10 * step + 1)


def unsharded_before(model: Any, rank: int, step: int) -> None:
    handles = [unit.unshard(async_op=True) for unit in units(model)]
    backward(model, rank, step)
    assert all(handles)


def one_layer(model: Any, rank: int, step: int) -> None:
    model.use = [step % 3, 2]
    backward(model, rank, step)


def frozen(mesh: Any) -> Any:
    module = seeded(models.Deep)
    module.layers[1].requires_grad_(False)
    module.layers[2].bias.requires_grad_(False)
    return shard(module, mesh)


class Uneven(nn.Module):
    """Parameters of which some ranks own less than others, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 5), nn.Linear(5, 1), nn.Linear(1, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def nested(mesh: Any) -> Any:
    """Units inside of units, which have parameters of their own as well."""
    inner = seeded(models.Deep)
    module = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH), seeded(models.Deep))
    with torch.no_grad():
        module[1].weight.copy_(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH) / 8)
        module[1].bias.zero_()
    shard(inner, mesh)
    return fully_shard(module, mesh=mesh)


def together(mesh: Any) -> Any:
    """Two layers that form one unit."""
    module = seeded(models.Deep)
    fully_shard([module.layers[0], module.layers[1]], mesh=mesh)
    return fully_shard(module, mesh=mesh)


def compiled(mesh: Any) -> Any:
    module = seeded(models.Deep)
    for layer in module.layers:
        layer.compile(backend="eager")
    return shard(module, mesh)


def in_dimension_1(mesh: Any) -> Any:
    return shard(seeded(models.Deep), mesh, shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None)


def prefetching(mesh: Any) -> Any:
    model = deep()(mesh)
    model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    return model


def policy(**dtypes: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(**dtypes)}


def of_type(dtype: torch.dtype) -> Build:
    return lambda mesh: shard(seeded(models.Typed, dtype), mesh)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODES = {
    "default": Mode(deep()),
    "kept after forward": Mode(deep(reshard_after_forward=False)),
    "resharded at the root": Mode(deep(reshard_after_forward=True)),
    "only the root": Mode(lambda mesh: fully_shard(seeded(models.Deep), mesh=mesh)),
    "bf16, reduced in fp32": Mode(deep(**policy(param_dtype=BF16, reduce_dtype=FP32))),
    "bf16": Mode(deep(**policy(param_dtype=BF16))),
    "fp16": Mode(deep(**policy(param_dtype=FP16))),
    "fp16, reduced in fp32": Mode(deep(**policy(param_dtype=FP16, reduce_dtype=FP32, output_dtype=FP32))),
    "bf16 parameters": Mode(of_type(BF16)),
    "float64 parameters": Mode(of_type(torch.float64)),
    "divided by 2": Mode(after(lambda unit: unit.set_gradient_divide_factor(2.0))),
    "summed": Mode(after(lambda unit: unit.set_force_sum_reduction_for_comms(True))),
    "accumulated before": Mode(deep(), accumulate),
    "accumulated after": Mode(deep(), twice),
    "kept after backward": Mode(deep(), accumulate_unsharded),
    "uneven": Mode(lambda mesh: shard(seeded(Uneven), mesh)),
    "frozen": Mode(frozen),
    "shared": Mode(lambda mesh: fully_shard(seeded(models.Tied), mesh=mesh)),
    "unused": Mode(lambda mesh: shard(seeded(models.Picky), mesh), one_layer),
    "unused, with zeros": Mode(
        after(lambda unit: unit.set_reduce_scatter_unused_params(True), lambda mesh: shard(seeded(models.Picky), mesh)),
        one_layer,
    ),
    "reused": Mode(lambda mesh: shard(seeded(models.Reusing), mesh)),
    "nested": Mode(nested),
    "two layers together": Mode(together),
    "CPU offload": Mode(deep(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "activation checkpointing": Mode(lambda mesh: shard(seeded(models.Checkpointed), mesh)),
    "compiled blocks": Mode(compiled),
    "dimension 1": Mode(in_dimension_1),
    "prefetching": Mode(prefetching),
    "unsharded by hand": Mode(deep(), unsharded_before),
    "own reduce-scatter group": Mode(
        lambda mesh: (model := deep()(mesh), model.set_separate_reduce_scatter_group(True))[0]
    ),
}


def check(ranks: Ranks, mode: Mode, mesh: Any) -> None:
    """Compare plain FSDP2, `exact` and `int8` in one mode."""
    plain = mode.build(mesh)
    wanted = train(plain, ranks.rank, run=mode.step)
    exact = mode.build(mesh)
    hook = ranks.register(exact, "exact")
    assert all(same(*pair) for pair in zip(train(exact, ranks.rank, run=mode.step), wanted, strict=True))
    assert same(weights(exact), weights(plain))
    hook.verify()
    coded = mode.build(mesh)
    hook = ranks.register(coded, "int8", gather="bf16", chunk_bytes=1024)
    got = train(coded, ranks.rank, run=mode.step)
    off = error(got[0], wanted[0])
    assert 0.0 < off < 0.03, off
    checked, stats = hook.verify(), hook.stats()
    assert checked.steps == stats.steps == hook.steps
    assert 0 < checked.error <= checked.bound
    assert stats.sent_bytes > 0


@on_ranks(2, specs=tuple(MODES))
def test_a_mode_works_and_exact_gives_the_bits_of_plain_fsdp2(ranks: Ranks) -> None:
    check(ranks, MODES[ranks.spec], mesh_of(ranks))


@on_ranks(4, specs=("default", "uneven", "kept after forward"))
def test_a_mode_works_on_four_ranks(ranks: Ranks) -> None:
    check(ranks, MODES[ranks.spec], mesh_of(ranks))


@on_ranks(2)
def test_what_is_reduced_in_bfloat16_is_added_up_in_float32_beside_the_backward_pass(ranks: Ranks) -> None:
    model = MODES["bf16"].build(mesh_of(ranks))
    ranks.register(model, "int8")
    with mock.patch.object(fsdp._Backward, "defer", autospec=True, side_effect=fsdp._Backward.defer) as deferred:
        (got,) = train(model, ranks.rank, steps=1)
    assert deferred.call_count == len(model.layers)
    assert not any(same({"": value}, {"": value.bfloat16().float()}) for value in got.values())
