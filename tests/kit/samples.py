"""Runs the Python samples of the documentation, each as a reader would have to set it up.

A sample finds the names that its page takes for granted: a model (in DDP unless the sample wraps it itself), an
optimizer, batches, a registered hook if it uses one without registering it, and so on. A line with `...` alone is a few
steps of training. Two ranks run it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # noqa: F401 - for samples
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.testing.processes import when_all_returned

WRAPS = (
    "DistributedDataParallel(",
    "fully_shard",
    "hsdp(",
    "LocalSGD(",
    "rounds.",
    "OneBitAdamW(model.parameters(), lr",
)
"""Samples with these begin with a module that nothing has wrapped yet."""
USES_HOOK = re.compile(r"\bhook\.")
MAKES_HOOK = re.compile(r"^\s*(?:hook = |with .* as rounds)", re.MULTILINE)
TRAIN = re.compile(r"^\.\.\.$", re.MULTILINE)


class Net(nn.Module):
    """Has `blocks`, as the samples for FSDP2 have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs).relu()
        return inputs


class Trainer:
    """Stands for torchtitan's."""

    def __init__(self, config: object) -> None:
        self.model_parts = [sharded(Net())]


def run_samples(rank: int, size: int, samples: list[str], folder: Path) -> None:
    """Run the samples of a page one after the other. A sample also finds what those before it have defined."""
    os.chdir(folder)
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as on two nodes
    defined: dict[str, Any] = {}
    for index, sample in enumerate(samples):
        names = setting(sample, rank, size, folder)
        given = set(names)
        names |= {name: value for name, value in defined.items() if name not in given}
        exec(compile(TRAIN.sub("train()", sample), f"sample {index}:\n{sample}", "exec"), names)
        if "WithGradwire" in names:
            names["WithGradwire"](None)
        close_later([value for value in names.values() if isinstance(value, gradwire.Hook)])
        defined = {name: value for name, value in names.items() if name not in given}
        dist.barrier()


def close_later(hooks: list[gradwire.Hook]) -> None:
    """Close them when no rank needs them any more."""
    for hook in hooks:
        when_all_returned(hook.close)


def sharded(model: nn.Module) -> nn.Module:
    """The model with `fully_shard`."""
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def setting(sample: str, rank: int, size: int, folder: Path) -> dict[str, Any]:
    """The names that a sample takes for granted."""
    torch.manual_seed(0)
    model: nn.Module = Net()
    if "get_state_dict(" in sample:
        model = sharded(model)
    elif not any(word in sample for word in WRAPS):
        model = DistributedDataParallel(model)
    batches = [torch.randn(4, 64) for _ in range(100 if "watch=100" in sample else 12)]
    names = dict(globals())  # torch, nn, dist, fully_shard, Path and so on: what pages import once
    names.update(model=model, net=Net(), GPT=Net, rank=rank, folder=str(folder), device="cpu", process_group=None)
    names.update(mesh=init_device_mesh("cpu", (size,)), nodes=size, gpus=1, policy=MixedPrecisionPolicy())
    names.update(codec=gradwire.codecs.BF16(), flat=torch.randn(64), tensor=torch.randn(1000), comm=Gather(size))
    names.update(batch=batches[0], data=batches, batches=batches)
    if "x, y" in sample:
        names["batches"] = [(batch, batch) for batch in batches]
    names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
    names["train"] = lambda: train(names["batches"], names["model"], names["optimizer"])
    if "rounds." in sample and not MAKES_HOOK.search(sample):
        names["rounds"] = gradwire.optim.LocalSGD(model, names["optimizer"], sync_every=2)
    if USES_HOOK.search(sample) and not MAKES_HOOK.search(sample):
        names["hook"] = gradwire.register(model, "int4:feedback=true")
        names["train"]()
    return names


@dataclass
class Gather:
    """The collective that the page about the engine uses."""

    size: int

    def all_gather(self, wire: Tensor) -> list[Tensor]:
        wires = [torch.empty_like(wire) for _ in range(self.size)]
        dist.all_gather(wires, wire)
        return wires


def loss(first: Any, batch: Any = None) -> Tensor:
    """`loss(model(batch))`, `loss(model(x), y)` and `loss(model, batch)`."""
    return (first(batch) if isinstance(first, nn.Module) else first).square().mean()


def train(batches: list[Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with each batch."""
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()
