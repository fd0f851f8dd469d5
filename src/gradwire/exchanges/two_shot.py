"""Two-shot: each rank averages one shard for all. What a rank sends does not grow with the number of ranks.

    rank 0  [ shard 0 | shard 1 | shard 2 ]     all-to-all     rank r holds every rank's shard r
    rank 1  [ shard 0 | shard 1 | shard 2 ]   ------------->   and averages them in float32
    rank 2  [ shard 0 | shard 1 | shard 2 ]     all-gather     the averages go back to everybody
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.comm import Comm


def two_shot_(flat: Tensor, codec: Codec, comm: Comm, residual: Tensor | None = None, align: int = 1) -> None:
    """Average in place.

    1. Encode each shard.  2. All-to-all.  3. Sum in float32.  4. Encode the mean.  5. All-gather.  6. Decode.
    """
    numel = shard_numel(flat.numel(), comm.size, align)
    shards = [_shard(flat, rank, numel) for rank in range(comm.size)]
    wires = _encode_shards(codec, shards, numel)
    _keep_loss(codec, flat, wires, residual, numel)

    received = comm.all_to_all(wires)
    mean = torch.empty(numel, dtype=_sum_dtype(flat), device=flat.device)
    for rank, other in enumerate(received):
        codec.decode_(mean, other, alpha=1.0 / comm.size, add=rank > 0)
    wire = codec.encode(mean)
    _keep_owners_loss(codec, mean, wire, residual, comm, numel)

    for shard, final in zip(shards, comm.all_gather(wire), strict=True):
        _decode_into(codec, shard, final, numel)


def shard_numel(numel: int, size: int, align: int) -> int:
    """Values in a shard: an equal part, rounded up to whole blocks."""
    return -(-numel // (size * align)) * align


def _shard(flat: Tensor, rank: int, numel: int) -> Tensor:
    return flat[rank * numel : (rank + 1) * numel]


def _encode_shards(codec: Codec, shards: list[Tensor], numel: int) -> Tensor:
    device = shards[0].device
    wires = torch.empty((len(shards), codec.wire_bytes(numel)), dtype=torch.uint8, device=device)
    for shard, wire in zip(shards, wires, strict=True):
        codec.encode(_padded(shard, numel), out=wire)
    return wires


def _padded(shard: Tensor, numel: int) -> Tensor:
    return shard if shard.numel() == numel else torch.nn.functional.pad(shard, (0, numel - shard.numel()))


def _decode_into(codec: Codec, shard: Tensor, wire: Tensor, numel: int) -> None:
    if shard.numel() == numel:
        codec.decode_(shard, wire)
    elif shard.numel():
        shard.copy_(codec.decode_(shard.new_empty(numel), wire)[: shard.numel()])


def _keep_loss(codec: Codec, flat: Tensor, wires: Tensor, residual: Tensor | None, numel: int) -> None:
    """What this rank's own encoding lost, on every shard."""
    if residual is None:
        return
    for rank, wire in enumerate(wires):
        kept, shard = _shard(residual, rank, numel), _shard(flat, rank, numel)
        sent = codec.decode_(torch.empty(numel, dtype=torch.float32, device=flat.device), wire)
        torch.sub(shard, sent[: shard.numel()], out=kept)


def _keep_owners_loss(
    codec: Codec, mean: Tensor, wire: Tensor, residual: Tensor | None, comm: Comm, numel: int
) -> None:
    """What encoding the mean lost, on the shard this rank owns; times the ranks, as residuals are undivided."""
    if residual is None:
        return
    kept = _shard(residual, comm.rank, numel)
    lost = codec.decode_(mean.clone(), wire, alpha=-1.0, add=True)
    kept.add_(lost[: kept.numel()], alpha=comm.size)


def _sum_dtype(flat: Tensor) -> torch.dtype:
    return torch.float64 if flat.dtype == torch.float64 else torch.float32
