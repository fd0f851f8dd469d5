"""Checks before a model with `fully_shard` gets a hook: what cannot carry one is refused, with the reason."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire._torch.fsdp import (
    OWN_COMMS,
    Unit,
    fsdp_module_class,
    gathered_dtype,
    groups_of,
    is_extended,
    is_fsdp1,
    param_names,
    unit_modules,
)
from gradwire._torch.traced import plain_name
from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges import Exchange, exchange
from gradwire.exchanges.coded import Coded
from gradwire.models.checks import check_types

HSDP = (
    "build it with gradwire.hsdp(model, mesh, ...), or call fully_shard with the 1-D mesh of the shards, "
    "mesh['shard'], and register(model, spec, replicas=..., mesh=mesh)"
)


def is_sharded(model: object) -> bool:
    """Whether `register` must treat the model as one with `fully_shard`; RegisterError for what it cannot treat."""
    if is_fsdp1(model):
        raise RegisterError(
            "this model uses FullyShardedDataParallel (FSDP1), which has no place for other collectives; use "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if not isinstance(model, nn.Module):
        return False
    known = fsdp_module_class()
    if known is not None:
        return any(isinstance(module, known) for module in model.modules())
    if any(type(module).__name__.startswith("FSDP") for module in model.modules()):
        raise RegisterError(
            f"fully_shard of torch {torch.__version__} has no methods for other collectives; torch 2.13 has them"
        )
    return False


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a model that have parameters, in the order of its modules."""
    units = []
    for name, module in unit_modules(model):
        groups = groups_of(module)
        if len(groups) > 1:
            raise RegisterError(
                f"module {name or 'root'!r} has {len(groups)} groups of parameters, on meshes of their own "
                "(shard_placement_fn), and FSDP2 takes other collectives only for modules with one; call fully_shard "
                "on the parts with another mesh, and register each part by itself"
            )
        for group in groups:
            if group.fsdp_params:
                units.append(Unit(module, group, [_clean(n) for n in param_names(model, group)]))
    return units


def _clean(name: str) -> str:
    return plain_name(name).replace("_checkpoint_wrapped_module.", "")


def check_units(units: Sequence[Unit], *, native: bool = False) -> None:
    """Raise RegisterError unless all units can use one hook. `native`: their mesh may be FSDP2's own HSDP."""
    if not dist.is_initialized():
        raise RegisterError("there is no process group: call torch.distributed.init_process_group() before registering")
    if not units:
        raise RegisterError("no module with fully_shard has parameters: there is nothing to communicate")
    for unit in units:
        _check_unit(unit, native)
    if any(set(_ranks(unit)) != set(_ranks(units[0])) for unit in units):
        raise RegisterError(
            "the modules of this model are sharded over different ranks; register each part by itself, as in "
            "gradwire.register(model.experts, ...), before or instead of the rest"
        )
    params = [(name, p.sharded_param) for unit in units for name, p in zip(unit.names, unit.params, strict=True)]
    check_types([(name, param) for name, param in params if param.requires_grad], "gradients")
    for name, param in params:
        if param.is_complex():
            raise RegisterError(f"parameter {name!r} is {param.dtype}; FSDP2 sends complex values as they are")


def _ranks(unit: Unit) -> list[int]:
    return dist.get_process_group_ranks(unit.shard_group)


def _check_unit(unit: Unit, native: bool) -> None:
    first = unit.names[0]
    if unit.mesh_kind == "HSDPMeshInfo" and not native:
        raise RegisterError(
            f"the module of {first!r} was sharded with a 2-D mesh (HSDP), whose all-reduce across replicas is fixed in "
            f"FSDP2; {HSDP}"
        )
    if unit.mesh_kind not in ("FSDPMeshInfo", "HSDPMeshInfo"):
        raise RegisterError(
            f"the module of {first!r} uses replicate(), whose all-reduce is fixed in FSDP2; call fully_shard on a mesh "
            f"of 1-rank shards instead: {HSDP}"
        )
    for name, param in zip(unit.names, unit.params, strict=True):
        if param.is_dtensor:
            raise RegisterError(f"parameter {name!r} is tensor-parallel as well, which gradwire cannot carry yet")
    _check_comms(unit)


def _check_comms(unit: Unit) -> None:
    gather, scatter, hook = unit.comms
    for comm in (gather, scatter):
        if type(comm).__module__.startswith("gradwire."):
            raise RegisterError(
                f"the module of {unit.names[0]!r} already has a gradwire hook; to change it use switch() of the Hook "
                "that register() returned, and close() to remove it"
            )
        if type(comm).__name__ not in OWN_COMMS:
            raise RegisterError(
                f"the module of {unit.names[0]!r} already has a collective of somebody else, {type(comm).__name__}; "
                "build the model without it"
            )
    if hook is not None:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise RegisterError(f"the module of {unit.names[0]!r} already has the all-reduce hook {name}; build it without")


def check_gather_types(units: Sequence[Unit], gather: Exchange) -> None:
    """Raise RegisterError unless the parameters of each unit can be gathered through a codec."""
    if not isinstance(gather, Coded):
        return
    for unit in units:
        dtypes = {gathered_dtype(param) for param in unit.params}
        extended = [name for name, param in zip(unit.names, unit.params, strict=True) if is_extended(param)]
        if extended:
            raise RegisterError(f"parameter {extended[0]!r} says itself what is gathered of it; use gather='exact'")
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise RegisterError(
                f"the module of {unit.names[0]!r} gathers parameters of the types {listed} as bytes; use gather='exact'"
            )


def gathers_of(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    """The first of the wanted gathers, and of the others those that the model can have and that send fewer bytes."""
    units = units_of(model)
    widest = max((gathered_dtype(param).itemsize for unit in units for param in unit.params), default=4)
    return [*wanted[:1], *(spec for spec in wanted[1:] if _can_gather(units, exchange(spec), widest))]


def _can_gather(units: Sequence[Unit], gather: Exchange, widest: int) -> bool:
    if not isinstance(gather, Coded) or gather.codec.wire_bytes(1024) >= 1024 * widest:
        return False
    try:
        check_gather_types(units, gather)
    except RegisterError:
        return False
    return True


def check_mesh(mesh: Any) -> None:
    """Raise SpecError unless `mesh` has a dimension of replicas and one of shards."""
    if not hasattr(mesh, "get_group") or mesh.ndim != 2:
        raise SpecError(f"mesh must be a 2-D DeviceMesh of (replicas, shards), got {mesh!r}")


def checked_parts(model: Any, units: Any) -> list[nn.Module]:
    """`units` as a list. SpecError unless they are different modules inside a model that is not sharded yet."""
    if not isinstance(model, nn.Module):
        raise SpecError(f"hsdp() takes a torch.nn.Module, got {type(model).__name__}")
    if is_sharded(model):
        raise RegisterError(
            "a part of this model is sharded already; gradwire.hsdp calls fully_shard by itself, so leave that out, or "
            "call gradwire.register(model, spec, replicas=..., mesh=mesh) instead"
        )
    if isinstance(units, str) or not isinstance(units, Iterable):
        raise SpecError(f"units must be a list of modules, such as model.layers, got {_short(units)}")
    parts, inside = list(units), {id(module) for module in model.modules()} - {id(model)}
    for at, part in enumerate(parts):
        if not isinstance(part, nn.Module) or id(part) not in inside:
            raise SpecError(f"units must be modules inside the model, but number {at} is {_short(part)}")
        if any(part is other for other in parts[:at]):
            raise SpecError(f"units must be different modules, but number {at} is there twice: {_short(part)}")
    return parts


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)


def replica_group(units: Sequence[Unit], mesh: Any, replicas: Exchange | None) -> dist.ProcessGroup | None:
    """The ranks that hold the same shards as this one."""
    if mesh is None and replicas is None:
        return None
    if mesh is None or replicas is None:
        raise SpecError("replicas=..., how replicas are averaged, and mesh=..., the 2-D mesh, go together")
    check_mesh(mesh)
    if dist.get_process_group_ranks(mesh.get_group(1)) != _ranks(units[0]):
        raise RegisterError(
            f"the model is sharded over the ranks {_ranks(units[0])}, but the second dimension of the mesh has "
            f"{dist.get_process_group_ranks(mesh.get_group(1))}; call fully_shard with mesh[{_second(mesh)}]"
        )
    group: dist.ProcessGroup = mesh.get_group(0)
    return group


def _second(mesh: Any) -> str:
    names = mesh.mesh_dim_names
    return repr(names[1]) if names else "its second dimension"
