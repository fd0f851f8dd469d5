"""One-shot: everybody sends everything once. The least error; the least wire at 2 ranks, where it is the default."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.codecs.base import new_total
from gradwire.comm import Comm
from gradwire.exchanges.plan import Plan, encode_part, keep_loss_, sum_part_


def one_shot_(flat: Tensor, whole: Plan, codec: Codec, comm: Comm, residual: Tensor | None = None) -> None:
    """Average in place; `whole` has a single part.

    1. Encode.  2. All-gather the wires.  3. Every rank decodes all wires in the order of the ranks and averages them.
    """
    (part,), wires = whole.parts, comm.rows(whole.wire_bytes, torch.uint8, flat.device)
    wire = wires[comm.rank]
    encode_part(codec, flat, part, wire)
    if residual is not None:
        keep_loss_(codec, flat, part, wire, residual.zero_())
    total = new_total(flat) if flat.dtype.itemsize < 4 else flat  # 16 bits are too coarse to add up in
    sum_part_(codec, total, part, comm.all_gather_(wires), 1.0 / comm.size)
    if total is not flat:
        flat.copy_(total)
