"""Checkpoints of a sharded model: the state of a `ShardedHook`, by fully qualified names of whole parameters.

Residuals of the reduce-scatter are as large as the model on every rank, and are saved in the order of the whole
parameter. Those of replicas are shards; a merged state holds them put together. So a state does not depend on how many
shards there were: only the sums over the ranks matter, and on another mesh each rank starts from sum / new size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.engine import checkpoint
from gradwire.engine.fingerprint import sealed
from gradwire.engine.hook import Hook
from gradwire.errors import StateError
from gradwire.exchanges.base import Exchange
from gradwire.exchanges.sharded import Shard


class Sharded(Protocol):
    """What is used of a ShardedHook."""

    exchange: Exchange
    rank: int
    size: int
    device: torch.device
    shards: dict[str, Shard]
    replicas: Hook | None

    @property
    def steps(self) -> int:
        """The number of steps."""

    def sum_over_all(self, values: Tensor) -> Tensor:
        """The sum over the ranks of all replicas."""


def place(hook: Sharded) -> tuple[int, int]:
    """The number of this rank among the ranks of all replicas, and how many these are."""
    if hook.replicas is None:
        return hook.rank, hook.size
    return hook.replicas.rank * hook.size + hook.rank, hook.replicas.size * hook.size


def pack(hook: Sharded, residuals: dict[str, Tensor], merged: bool) -> dict[str, Any]:
    """The state of this rank, or of all. With feedback there is an entry for every parameter, zeros if need be.

    So the state of a new hook has the form of a saved one, which `torch.distributed.checkpoint` loads into.
    """
    if hook.exchange.takes_residual:
        for name, shard in hook.shards.items():
            if shard.param.requires_grad and name not in residuals:
                residuals[name] = torch.zeros(shard.whole.numel(), device=hook.device)
    if merged:
        residuals = _merged(hook, residuals)
    rank, size = place(hook)
    state = checkpoint.pack(str(hook.exchange), hook.steps, checkpoint.MERGED if merged else rank, size, residuals)
    if hook.replicas is None:
        return state
    return sealed({**state, "replicas": _pack_replicas(hook, hook.replicas, merged)})


def _merged(hook: Sharded, residuals: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum over the ranks of all replicas, of whole parameters."""
    params = [(name, shard.param) for name, shard in hook.shards.items()]
    return checkpoint.merged(residuals, params, hook.sum_over_all)


def _pack_replicas(hook: Sharded, replicas: Hook, merged: bool) -> dict[str, Any]:
    state = {**replicas.state_dict(), "shards": hook.size}
    like = torch.zeros((), device=hook.device)
    params = [(name, like.expand(shard.padded)) for name, shard in hook.shards.items() if shard.param.requires_grad]
    if replicas.exchange.takes_residual:
        for name, param in params:
            state["residuals"].setdefault(name, torch.zeros(param.numel(), device=hook.device))
    for name, kept in replicas.exchange.new_memory(params, hook.device).items():
        state["memory"].setdefault(name, kept)
    if not merged:
        return sealed(state)
    whole = {name: _whole(hook.shards[name], part, hook.rank, hook.size) for name, part in state["residuals"].items()}
    return sealed({**state, "rank": checkpoint.MERGED, "residuals": _merged(hook, whole), "memory": {}})


def _whole(shard: Shard, part: Tensor, rank: int, size: int) -> Tensor:
    """A shard as a part of the whole parameter, with zeros elsewhere."""
    rows = torch.zeros(size, shard.padded.numel(), device=part.device)
    rows[rank] = part
    return shard.from_rows(rows)


def unpack(hook: Sharded, states: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Tensor]]:
    """The step, and the residuals of the reduce-scatter that this rank starts from."""
    return checkpoint.unpack(states, *place(hook))


def load_replicas(hook: Sharded, states: Sequence[Mapping[str, Any]]) -> None:
    """Continue the average across replicas from a checkpoint, if it has one."""
    replicas = hook.replicas
    if replicas is None or not all("replicas" in state for state in states):
        return
    for state in states:
        if (state["rank"], state["size"]) == place(hook) and state["replicas"]["shards"] == hook.size:
            replicas.load_state_dict(state["replicas"])
            return
    totals = _totals(hook, states)
    own = {
        name: hook.shards[name].to_rows(total.to(hook.device), hook.size)[hook.rank] / replicas.size
        for name, total in totals.items()
    }
    first = states[0]["replicas"]
    replicas.load_state_dict(checkpoint.pack(first["hook"], first["step"], replicas.rank, replicas.size, own))


def _totals(hook: Sharded, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The sum of the replicas' residuals, of whole parameters."""
    if len(states) == 1 and states[0]["rank"] == checkpoint.MERGED:
        return dict(states[0]["replicas"]["residuals"])
    totals: dict[str, Tensor] = {}
    for state in states:
        part, shards = state["replicas"], state["replicas"]["shards"]
        for name, values in part["residuals"].items():
            if name not in hook.shards:
                raise StateError(f"the checkpoint is of another model; it holds state of {name}")
            shard = _resized(hook.shards[name], shards)
            whole = _whole(shard, values.to(hook.device), state["rank"] % shards, shards)
            totals[name] = totals[name] + whole if name in totals else whole
    return totals


def _resized(shard: Shard, size: int) -> Shard:
    """How the same parameter is cut for another number of ranks."""
    padded = list(shard.whole)
    padded[shard.dim] = -(-padded[shard.dim] // size)
    return Shard(shard.name, shard.param, shard.whole, torch.Size(padded), shard.dim)
