"""What register() refuses for models with `fully_shard`, on all ranks, with an error that says what is allowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gradwire
from gradwire import RegisterError, SpecError
from gradwire.models import sharded_checks

from ..kit import models
from ..kit.models import seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import mesh_2d, mesh_of, shard, train, units
from ..kit.trial import raised
from ..kit.versions import sharded_models

pytestmark = sharded_models


def deep(ranks: Ranks, **options: Any) -> Any:
    return shard(seeded(models.Deep), mesh_of(ranks), **options)


def refusal(model: Any, spec: Any = "int8", kind: type[Exception] = RegisterError, **options: Any) -> str:
    return raised(kind, lambda: gradwire.register(model, spec, **options))


@on_ranks(2)
def test_other_models_are_refused(ranks: Ranks) -> None:
    text = refusal(seeded(models.Deep))
    assert "DistributedDataParallel" in text
    assert "fully_shard" in text
    old = FullyShardedDataParallel(seeded(models.Deep), process_group=ranks.group, device_id=torch.device("cpu"))
    assert "FSDP1" in refusal(old)
    assert "FSDP1" in refusal(nn.Sequential(old))
    empty = fully_shard(nn.Sequential(nn.Tanh()), mesh=mesh_of(ranks))
    assert "nothing to communicate" in refusal(empty)


@on_ranks(2)
def test_a_torch_without_the_methods_is_named(ranks: Ranks) -> None:
    model, known = deep(ranks), sharded_checks.fsdp_module_class
    sharded_checks.fsdp_module_class = lambda: None
    try:
        text = refusal(model)
    finally:
        sharded_checks.fsdp_module_class = known
    assert torch.__version__ in text
    assert "torch 2.13" in text


@on_ranks(4)
def test_native_hsdp_and_replicate_are_refused_with_the_way_to_build_them(ranks: Ranks) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = mesh_2d(ranks, 2)
    text = refusal(shard(seeded(models.Deep), mesh))
    assert "gradwire.hsdp(model, mesh" in text
    assert "2-D mesh" in text
    assert "replicate()" in refusal(replicate(seeded(models.Deep), mesh=mesh_of(ranks)))


@on_ranks(4)
def test_several_groups_or_meshes_are_refused(ranks: Ranks) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    mesh = mesh_2d(ranks, 2)
    info = _get_mesh_info(mesh["shard"], None)

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), info) if param.ndim == 1 else None

    several = fully_shard(seeded(models.Deep), mesh=mesh_of(ranks), shard_placement_fn=place)
    text = refusal(several)
    assert "2 groups of parameters" in text
    assert "'root'" in text
    mixed = seeded(models.Deep)
    fully_shard(mixed.layers[0], mesh=mesh["shard"])
    fully_shard(mixed, mesh=mesh_of(ranks))
    assert "different ranks" in refusal(mixed)


@on_ranks(2)
def test_a_part_of_a_model_can_be_registered_by_itself(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model.layers[1], "int8")
    train(model, ranks.rank, 1)
    assert hook.verify().steps == 1
    assert "already has a gradwire hook" in refusal(model)
    assert "switch()" in refusal(model.layers[1])


@on_ranks(2)
def test_collectives_of_somebody_else_are_refused(ranks: Ranks) -> None:
    class Mine:
        def allocate(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

        def __call__(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        model = deep(ranks)
        getattr(model.layers[0], method)(Mine())
        text = refusal(model)
        assert "Mine" in text
        assert "'layers.0.weight'" in text
    model = deep(ranks)
    model.layers[0].set_all_reduce_hook(print)
    assert "print" in refusal(model)


@on_ranks(2)
def test_specs_and_arguments_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    model = deep(ranks)
    assert "cannot reduce-scatter" in refusal(model, "powersgd", SpecError)
    assert "cannot reduce-scatter" in refusal(model, "two_level:node=1", SpecError)
    assert "shots" in refusal(model, "int8:shots=two", SpecError)
    assert "auto is not available together with replicas" in refusal(model, "auto", SpecError, replicas="int4")
    assert "cannot reduce-scatter" in refusal(model, "auto", SpecError, hooks=["powersgd"])
    assert "gather=topk" in refusal(model, "int8", SpecError, gather="topk:ratio=0.1")
    assert "unknown hook 'int9'" in refusal(model, "int8", SpecError, gather="int9")
    assert "go together" in refusal(model, "int8", SpecError, replicas="int4")
    assert "go together" in refusal(model, "int8", SpecError, mesh=mesh_of(ranks))
    assert "2-D DeviceMesh" in refusal(model, "int8", SpecError, replicas="int4", mesh=mesh_of(ranks))
    assert "sharded over the ranks" in refusal(model, replicas="int4", mesh=mesh_2d(ranks, 2))
    assert "bucket_mb" in refusal(model, "int8", SpecError, bucket_mb=4)
    assert "chunk_bytes" in refusal(model, "int8", SpecError, chunk_bytes=10)
    ddp = ranks.wrap(seeded(models.Deep))
    assert "gather" in refusal(ddp, "int8", SpecError, gather="bf16")
    assert "fully_shard" in refusal(ddp, "int8:feedback=true,residual=int8", SpecError)
    ranks.register(model, "int8")  # nothing was left behind


@on_ranks(2)
def test_ranks_must_ask_for_the_same(ranks: Ranks) -> None:
    assert "same hook" in refusal(deep(ranks), "int8" if ranks.rank else "bf16")
    assert "same hook" in refusal(deep(ranks), "int8", gather="int8" if ranks.rank else "bf16")


@on_ranks(2)
def test_parameters_that_cannot_be_carried_are_refused(ranks: Ranks) -> None:
    mesh = mesh_of(ranks)
    frozen = seeded(models.Deep)
    frozen.requires_grad_(False)
    assert "nothing to average" in refusal(shard(frozen, mesh))
    mixed = seeded(models.Deep, 1)
    mixed.layers[0].bias = nn.Parameter(torch.zeros(models.WIDTH, dtype=torch.bfloat16), requires_grad=False)
    mixed = fully_shard(mixed, mesh=mesh)
    assert "bfloat16, float32 as bytes" in refusal(mixed, gather="int8")
    ranks.register(mixed, "int8")
    parallel = seeded(models.Deep, 1)
    grid = mesh_2d(ranks, 1)
    for name, param in list(parallel.layers[0].named_parameters()):
        local = nn.Parameter(distribute_tensor(param.detach(), grid["replicate"], [Shard(0)]))
        setattr(parallel.layers[0], name, local)
    assert "tensor-parallel" in refusal(fully_shard(parallel, mesh=grid["shard"]))


@on_ranks(2)
def test_hsdp_needs_a_2d_mesh_with_names(ranks: Ranks) -> None:
    module = seeded(models.Deep)
    assert "2-D DeviceMesh" in raised(SpecError, lambda: gradwire.hsdp(module, mesh_of(ranks)))
    nameless = torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(2).view(2, 1))
    assert "names" in raised(SpecError, lambda: gradwire.hsdp(module, nameless))


@on_ranks(2)
def test_hsdp_refuses_what_it_cannot_build_and_leaves_the_model_as_it_is(ranks: Ranks) -> None:
    mesh, module = mesh_2d(ranks, 2), seeded(models.Deep)
    layers: Any = module.layers
    wrong: dict[str, dict[str, Any]] = {
        "list of modules, such as model.layers, got 3": {"units": 3},
        "list of modules, such as model.layers, got 'layers'": {"units": "layers"},
        "list of modules, such as model.layers, got a Linear": {"units": layers[0]},
        "inside the model, but number 1 is 3": {"units": [layers[0], 3]},
        "inside the model, but number 0 is a Linear": {"units": [nn.Linear(2, 2)]},
        "inside the model, but number 0 is a Deep": {"units": [module]},
        "number 1 is there twice": {"units": [layers[0], layers[0]]},
        "powersgd cannot reduce-scatter": {"spec": "powersgd"},
        "is a hook and a gather": {"spec": "int8/bf16"},
        "auto is not available": {"spec": "auto"},
        "gather=topk cannot": {"gather": "topk"},
        "unknown hook 'int9'": {"replicas": "int9"},
        "got NoneType": {"replicas": None},
        "chunk_bytes must be": {"chunk_bytes": 0},
    }
    for message, options in wrong.items():
        assert message in raised(SpecError, lambda options=options: gradwire.hsdp(module, mesh, **options)), options
    assert not units(module)
    assert "takes a torch.nn.Module, got int" in raised(SpecError, lambda: gradwire.hsdp(3, mesh))  # type: ignore[arg-type]
    shard(module, mesh["shard"])
    assert "sharded already" in raised(RegisterError, lambda: gradwire.hsdp(module, mesh))
    text = raised(SpecError, lambda: gradwire.register(module, "int8/bf16"))
    assert 'write register(model, "int8", gather="bf16")' in text
