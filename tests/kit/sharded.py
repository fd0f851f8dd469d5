"""Models with `fully_shard`: how the tests build and train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from .models import batch
from .ranks import Ranks


def mesh_of(ranks: Ranks, group: dist.ProcessGroup | None = None, place: str = "cpu") -> DeviceMesh:
    """All ranks of a test, or those of a group, as a 1-D mesh."""
    return DeviceMesh.from_group(group or ranks.group, place)


def mesh_2d(ranks: Ranks, replicas: int, place: str = "cpu") -> DeviceMesh:
    """(replicas, shards), by rows of consecutive ranks."""
    ids = torch.arange(ranks.size).view(replicas, -1)
    return DeviceMesh(place, ids, mesh_dim_names=("replicate", "shard"))


def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Shard every layer of a model by itself, and then the rest."""
    for layer in getattr(module, "layers", ()):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def whole(tensor: Tensor) -> Tensor:
    """All values of a sharded tensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


Step = Callable[[Any, int, int], None]


def backward(model: Any, rank: int, step: int) -> None:
    """Forward and backward on the data of a rank."""
    model(batch(rank, step)).float().square().mean().backward()


def train(model: Any, rank: int, steps: int = 3, run: Step = backward, begin: int = 0) -> list[dict[str, Tensor]]:
    """Train with momentum, and return the gradients of every step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    seen = []
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        run(model, rank, step)
        seen.append(gradients(model))
        optimizer.step()
    return seen


def error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The relative error of all gradients together."""
    assert got.keys() == wanted.keys()
    off = torch.cat([(got[name].double() - wanted[name].double()).flatten() for name in wanted])
    return float(off.norm() / torch.cat([value.double().flatten() for value in wanted.values()]).norm())


def same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal, bit for bit."""
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


class HeldComm:
    """The collectives of a job; `arrived` is called once it has sent its encoded gradients and has those of others."""

    def __init__(self, comm: Any, arrived: Callable[[], object]) -> None:
        self._comm, self._arrived = comm, arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """As the collective itself."""
        result: Tensor = self._comm.all_to_all(tensor)
        self._arrived()
        return result
