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
from gradwire.scratch import empty


def two_shot_(flat: Tensor, codec: Codec, comm: Comm, residual: Tensor | None = None, align: int = 1) -> None:
    """Average in place.

    1. Encode each shard for its owner; one's own stays as it is.  2. All-to-all.  3. Sum in float32.
    4. Encode the mean.  5. All-gather.  6. Decode, one's own shard too: everybody must hold the same bits.
    """
    numel = shard_numel(flat.numel(), comm.size, align)
    shards = [_shard(flat, rank, numel) for rank in range(comm.size)]
    wires = _encode_shards(codec, shards, comm.rank, numel)
    _keep_loss(codec, flat, wires, comm.rank, residual, numel)

    mean = empty((numel,), _sum_dtype(flat), flat.device)
    torch.mul(_padded(shards[comm.rank], numel), 1.0 / comm.size, out=mean)
    for rank, other in enumerate(comm.all_to_all(wires)):
        if rank != comm.rank:
            codec.decode_(mean, other, alpha=1.0 / comm.size, add=True)
    wire = codec.encode(mean)
    _keep_owners_loss(codec, mean, wire, residual, comm, numel)

    for shard, final in zip(shards, comm.all_gather(wire), strict=True):
        _decode_into(codec, shard, final, numel)


def shard_numel(numel: int, size: int, align: int) -> int:
    """Values in a shard: an equal part, rounded up to whole blocks."""
    return -(-numel // (size * align)) * align


def _shard(flat: Tensor, rank: int, numel: int) -> Tensor:
    return flat[rank * numel : (rank + 1) * numel]


def _encode_shards(codec: Codec, shards: list[Tensor], own: int, numel: int) -> Tensor:
    wires = empty((len(shards), codec.wire_bytes(numel)), torch.uint8, shards[0].device)
    for rank, (shard, wire) in enumerate(zip(shards, wires, strict=True)):
        if rank != own:
            codec.encode(_padded(shard, numel), out=wire)
    return wires


def _padded(shard: Tensor, numel: int) -> Tensor:
    return shard if shard.numel() == numel else torch.nn.functional.pad(shard, (0, numel - shard.numel()))


def _decode_into(codec: Codec, shard: Tensor, wire: Tensor, numel: int) -> None:
    if shard.numel() == numel:
        codec.decode_(shard, wire)
    elif shard.numel():
        shard.copy_(codec.decode_(shard.new_empty(numel), wire)[: shard.numel()])


def _keep_loss(codec: Codec, flat: Tensor, wires: Tensor, own: int, residual: Tensor | None, numel: int) -> None:
    """What this rank's encoding lost, on every shard but its own, which loses nothing."""
    if residual is None:
        return
    for rank, wire in enumerate(wires):
        kept, shard = _shard(residual, rank, numel), _shard(flat, rank, numel)
        if rank == own:
            kept.zero_()
            continue
        sent = codec.decode_(empty((numel,), torch.float32, flat.device), wire)
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
