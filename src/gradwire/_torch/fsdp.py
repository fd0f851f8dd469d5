"""Private names of FSDP2 (`torch.distributed.fsdp.fully_shard`), as seen in torch 2.13.0.

One call of `fully_shard` makes a *unit*: the parameters of a module that are gathered together before they are used,
and whose gradients are reduced together. FSDP2 has public methods that replace its collectives (see NEEDED), but the
replacements are not told which parameters a message holds: that is what this module reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NEEDED = ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook")
"""The public methods by which collectives are replaced. They are in torch 2.13.0 and 2.15.0, not in 2.6.0."""
OWN_COMMS = ("DefaultAllGather", "DefaultReduceScatter", "ProcessGroupAllocAllGather", "ProcessGroupAllocReduceScatter")
"""The collectives that FSDP2 uses by itself, or after `set_allocate_memory_from_process_group`."""


def fsdp_module_class() -> Any:
    """`torch.distributed.fsdp.FSDPModule`, or None where torch has none, or none with the methods that are needed."""
    fsdp = getattr(torch.distributed, "fsdp", None)
    if fsdp is None:
        import torch.distributed.fsdp as fsdp
    found = getattr(fsdp, "FSDPModule", None)
    return found if found is not None and all(hasattr(found, name) for name in NEEDED) else None


def is_fsdp1(model: object) -> bool:
    """Whether the model is, or has inside, a `FullyShardedDataParallel` (FSDP1)."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, nn.Module) and any(isinstance(m, FullyShardedDataParallel) for m in model.modules())


def unit_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules of a model that `fully_shard` was called on, by name; of several that form one unit, the first."""
    found, seen = [], set()
    for name, module in model.named_modules():
        if isinstance(module, fsdp_module_class()) and id(state := module._get_fsdp_state()) not in seen:
            seen.add(id(state))
            found.append((name, module))
    return found


def groups_of(module: Any) -> list[Any]:
    """The groups of parameters that a call of `fully_shard` has made: several with meshes of their own for some."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def on_root(state: Any, call: Callable[[Any], None]) -> None:
    """Call `call` with the root of every model with `fully_shard`, before its first forward pass begins.

    `state` is the class `FSDPState`. Its first forward pass decides which module is the root. A second call of this
    function changes nothing.
    """
    original = state._lazy_init
    if hasattr(original, "gradwire_original"):
        return

    def lazy_init(self: Any) -> None:
        new = self._is_root is None
        original(self)
        if new and self._is_root:
            call(self._modules[0])

    lazy_init.gradwire_original = original  # type: ignore[attr-defined]
    state._lazy_init = lazy_init


class Unit:
    """One call of `fully_shard` on a module with parameters of its own. It refers to FSDP2's own objects weakly."""

    def __init__(self, module: Any, group: Any, names: Sequence[str]) -> None:
        self.names = tuple(names)
        """The names of all its parameters, in the order of its messages."""
        self._module, self._group = weakref.ref(module), weakref.ref(group)

    @property
    def module(self) -> Any:
        """The module, with FSDP2's public methods."""
        return self._module()

    @property
    def group(self) -> Any:
        """FSDP2's `FSDPParamGroup`."""
        return self._group()

    @property
    def mesh_kind(self) -> str:
        """`FSDPMeshInfo` for a plain mesh, `HSDPMeshInfo` for a 2-D one, `DDPMeshInfo` for `replicate`."""
        return type(self.group.mesh_info).__name__

    @property
    def replica_mesh(self) -> Any:
        """The 2-D mesh of (replicas, shards) that a module was sharded with, if it was one."""
        info = self.group.mesh_info
        return info.mesh if self.mesh_kind == "HSDPMeshInfo" else None

    def drop_replicas(self) -> None:
        """Make FSDP2 treat a module that was sharded with a 2-D mesh as one on the mesh of its shards alone.

        From then on it averages nothing across replicas. The parameters stay as they are.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        info = self.group.mesh_info
        self.group.mesh_info = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks over which the parameters are sharded."""
        group: dist.ProcessGroup = self.group.mesh_info.shard_process_group
        return group

    @property
    def device(self) -> torch.device:
        """Where the unit computes."""
        device: torch.device = self.group.device
        return device

    @property
    def comms(self) -> tuple[Any, Any, Any]:
        """What it gathers, reduce-scatters and all-reduces with."""
        return self.group._all_gather_comm, self.group._reduce_scatter_comm, self.group._all_reduce_hook

    def drop_all_reduce_hook(self) -> None:
        """Remove the hook; there is no public way."""
        self.group._all_reduce_hook = None

    @property
    def divides_by_itself(self) -> bool:
        """Whether `set_gradient_divide_factor` was used: the gradients are then divided by that and nothing else."""
        return self.group.gradient_divide_factor is not None

    @property
    def reduces(self) -> bool:
        """What `set_requires_gradient_sync` was last called with."""
        return bool(self.group.reduce_grads)

    @property
    def all_reduces(self) -> bool:
        """What `set_requires_all_reduce` was last called with."""
        return bool(self.group.all_reduce_grads)

    @property
    def params(self) -> list[Any]:
        """FSDP2's `FSDPParam` objects, in order."""
        return list(self.group.fsdp_params)

    def with_gradient(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients will be reduced when the unit's backward pass ends now."""
        unused = self.group.reduce_scatter_unused_params
        return tuple(name for name, param in zip(self.names, self.params, strict=True) if _has_gradient(param, unused))

    def uses_result_late(self, names: Sequence[str], dtype: torch.dtype, hook: object) -> bool:
        """Whether the reduced gradients may be there as late as the end of the backward pass.

        FSDP2 makes the sharded gradients views of the result. It reads the values at once where it converts or divides
        them, adds them to gradients that are there already, copies them to another device, or calls hooks of the user.
        `hook` is the all-reduce hook that does not, if any.
        """
        if self.group._all_reduce_hook not in (None, hook) or self._divides_afterwards(dtype):
            return False
        chosen = [param for name, param in zip(self.names, self.params, strict=True) if name in set(names)]
        return all(
            param.orig_dtype == dtype and param.sharded_param.grad is None and not _has_hooks(param) for param in chosen
        )

    def _divides_afterwards(self, dtype: torch.dtype) -> bool:
        """Whether FSDP2 divides the result itself, as it does to avoid an overflow, or if it was told to add only."""
        adds_only = getattr(self.group, "force_sum_reduction_for_comms", False)
        return dtype not in (torch.float32, torch.bfloat16) or bool(adds_only)

    def before_reduction(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` whenever the unit's backward pass has ended, before it reduces; the result undoes it."""
        group = self.group
        original = type(group).post_backward
        held = weakref.ref(group)

        def post_backward(*unused: Any) -> None:
            call()
            original(held(), *unused)

        group.post_backward = post_backward

        def undo() -> None:
            if (alive := held()) is not None:
                vars(alive).pop("post_backward", None)

        return undo


def _has_gradient(param: Any, unused: bool) -> bool:
    if not hasattr(param, "_unsharded_param"):
        return False
    given = param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None
    return given or (unused and param.unsharded_param.requires_grad)


def param_names(model: nn.Module, group: Any) -> list[str]:
    """The fully qualified names of a group's parameters, of shared ones the first."""
    prefixes: dict[int, str] = {}
    for name, module in model.named_modules():
        prefixes.setdefault(id(module), f"{name}." if name else "")
    infos = [param._module_info for param in group.fsdp_params]
    return [prefixes[id(info.module)] + info.param_name for info in infos]


def whole_size(param: Any) -> torch.Size:
    """The shape of a whole parameter."""
    size: torch.Size = param._orig_size
    return size


def is_extended(param: Any) -> bool:
    """Whether the parameter's own code says what is gathered (`fsdp_pre_all_gather`)."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def gathered_dtype(param: Any) -> torch.dtype:
    """The type in which a parameter is gathered."""
    dtype: torch.dtype = param.mp_policy.param_dtype or param.sharded_param.dtype
    return dtype


def reduced_dtype(param: Any) -> torch.dtype:
    """The type in which its gradient is reduced."""
    dtype: torch.dtype = param.mp_policy.reduce_dtype or gathered_dtype(param)
    return dtype


def _has_hooks(param: Any) -> bool:
    """Whether the user wants to be called with the sharded gradient during the backward pass."""
    return bool(getattr(param.sharded_param, "_post_accumulate_grad_hooks", None))


def factor_of(op: Any, size: int) -> float:
    """By which factor a reduction multiplies the sum: SUM, AVG, or PREMUL_SUM, which only shows it in its state."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    if op == dist.ReduceOp.SUM:
        return 1.0
    return float(op.__getstate__()[1])


def is_premultiplied(op: Any) -> bool:
    """Whether the operation is PREMUL_SUM, which gloo does not have."""
    return op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM)


class Waited(dist.Work):
    """Work of torch that ends when `wait` of something else does."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the result."""
        self._wait()
        return True


def local_values(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; other tensors as they are."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
