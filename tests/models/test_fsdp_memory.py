"""The memory that a hook on a model with `fully_shard` takes: bounded, and all of it counted."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.engine.sharded import ShardedHook
from gradwire.exchanges import exchange
from gradwire.models.fsdp import MOST_PENDING

from ..kit.models import Deep, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import backward, mesh_of, shard
from ..kit.versions import sharded_models

pytestmark = sharded_models

LAYERS = 6
SLACK_BYTES = 256
"""For single values, such as whether a sum is finite."""


class Allocations(TorchDispatchMode):
    """Counts what is allocated and not freed yet, in whichever threads it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak_bytes = 0
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            if id_of(made) not in given:
                self.add(made.untyped_storage())
        return result

    def add(self, storage: Any) -> None:
        with self._lock:
            key = storage.data_ptr()
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
            self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def deep(ranks: Ranks) -> Any:
    """Units of the same size, and a root without parameters of its own."""
    return shard(seeded(Deep, LAYERS), mesh_of(ranks))


def wire_bytes(model: Any, spec: str, size: int) -> int:
    """The encoded rows of one unit's message, those of all ranks."""
    coded: Any = exchange(spec)
    shards = [-(-p.shape[0] // size) * (p.numel() // p.shape[0]) for p in model.layers[0].parameters()]
    exempt = [p.dim() < 2 and "exempt=none" not in spec for p in model.layers[0].parameters()]
    return size * sum(4 * n if e else coded.codec.wire_bytes(n) for n, e in zip(shards, exempt, strict=True))


def hold_back(hook: ShardedHook) -> Allocations:
    """Let no reduction begin before as many as possible are under way. What all of them allocate."""
    jobs, allocated, submitted = hook.scatter_jobs, Allocations(), list[threading.Event]()

    def held(number: int, job: Any, comm: Any) -> None:
        submitted[min(number + MOST_PENDING, LAYERS - 1)].wait(30.0)
        with allocated:
            job(comm)

    def made(*args: Any) -> Any:
        number = sum(event.is_set() for event in submitted)
        submitted[number].set()
        return [partial(held, number, job) for job in jobs(*args)]

    submitted += [threading.Event() for _ in range(LAYERS)]
    hook.scatter_jobs = made  # type: ignore[method-assign]
    return allocated


SPECS = ("int8", "bf16", "int4:exempt=none", "int4:feedback=true,exempt=none")


@on_ranks(2, specs=SPECS)
def test_at_most_the_messages_in_flight_and_their_wires_are_held(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, gather="int8")
    assert isinstance(hook, ShardedHook)
    message = sum(param.numel() for param in model.layers[0].parameters()) * 4
    backward(model, ranks.rank, 0)
    model.zero_grad()
    allocated = hold_back(hook)
    hook.reset_stats()
    backward(model, ranks.rank, 1)
    parts = hook.stats_by_part()
    sent = wire_bytes(model, ranks.spec, ranks.size)
    wires = 2 * sent + sent // ranks.size  # those sent, those received, and one row until it is in its place
    if hook.exchange.takes_residual:
        wires += 2 * message  # a copy of the residual, and its sum with the gradients
        assert hook.residual_bytes == LAYERS * message
    bound = (MOST_PENDING + 1) * (message + wires)
    assert message < parts["gradients"].peak_bytes <= bound
    assert allocated.peak_bytes <= parts["gradients"].peak_bytes + SLACK_BYTES * LAYERS, "something is not counted"
    assert 0 < parts["parameters"].peak_bytes <= 2 * wire_bytes(model, "int8", ranks.size)
    assert hook.stats().peak_bytes == sum(part.peak_bytes for part in parts.values())
