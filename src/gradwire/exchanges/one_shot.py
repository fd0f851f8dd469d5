"""One-shot: everybody sends everything once. The least error; the least wire at 2 ranks, where it is the default."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.comm import Comm
from gradwire.exchanges.plan import Plan, encode_part, keep_loss_, new_wires, sum_part_
from gradwire.scratch import empty


def one_shot_(flat: Tensor, whole: Plan, codec: Codec, comm: Comm, residual: Tensor | None = None) -> None:
    """Average in place; `whole` has a single part.

    1. Encode.  2. All-gather the wires.  3. Every rank decodes all wires in the order of the ranks and averages them.
    """
    (part,), (wire,) = whole.parts, new_wires(whole, flat)
    encode_part(codec, flat, part, wire)
    if residual is not None:
        keep_loss_(codec, flat, part, wire, residual.zero_())
    total = _room_for_sum(flat)
    sum_part_(codec, total, part, comm.all_gather(wire), 1.0 / comm.size)
    if total is not flat:
        flat.copy_(total)


def _room_for_sum(flat: Tensor) -> Tensor:
    """`flat` itself, unless its type is too coarse to add up in."""
    return flat if flat.dtype in (torch.float32, torch.float64) else empty(flat.shape, torch.float32, flat.device)
