"""Two-shot: each rank averages one part for all. What a rank sends does not grow with the number of ranks.

rank 0  [ part 0 | part 1 | part 2 ]     all-to-all     rank r holds every rank's part r
rank 1  [ part 0 | part 1 | part 2 ]   ------------->   and averages them in float32
rank 2  [ part 0 | part 1 | part 2 ]     all-gather     the averages go back to everybody
"""

from __future__ import annotations

from torch import Tensor

from gradwire.codecs import Codec
from gradwire.comm import Comm
from gradwire.exchanges.plan import (
    Plan,
    decode_part_,
    encode_part,
    keep_loss_,
    new_wires,
    reduce_part,
    reduce_part_keeping_loss,
)


def two_shot_(flat: Tensor, split: Plan, codec: Codec, comm: Comm, residual: Tensor | None = None) -> None:
    """Average in place; `split` has a part for every rank.

    1. Encode each part for its owner; one's own stays as it is.  2. All-to-all.  3. Sum in float32.
    4. Encode the mean.  5. All-gather.  6. Decode, one's own part too: everybody must hold the same bits.
    """
    wires, own = new_wires(split, flat), split.parts[comm.rank]
    for rank, (part, wire) in enumerate(zip(split.parts, wires, strict=True)):
        if rank != comm.rank:
            encode_part(codec, flat, part, wire)
    if residual is not None:
        residual.zero_()
        for rank, (part, wire) in enumerate(zip(split.parts, wires, strict=True)):
            if rank != comm.rank:
                keep_loss_(codec, flat, part, wire, residual)

    arrived, means = comm.all_to_all(wires), comm.rows(split.wire_bytes, wires.dtype, flat.device)
    mean = means[comm.rank]
    if residual is None:
        reduce_part(codec, flat, own, arrived, comm.rank, 1.0 / comm.size, mean)
    else:
        reduce_part_keeping_loss(codec, flat, own, arrived, comm.rank, comm.size, mean, residual)

    for part, wire in zip(split.parts, comm.all_gather_(means), strict=True):
        decode_part_(codec, flat, part, wire)
