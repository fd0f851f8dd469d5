"""One-shot: everybody sends everything once. The least error; the least wire at 2 ranks, where it is the default."""

from __future__ import annotations

from torch import Tensor

from gradwire.codecs import Codec
from gradwire.comm import Comm


def one_shot_(flat: Tensor, codec: Codec, comm: Comm, residual: Tensor | None = None) -> None:
    """Average in place.

    1. Encode.  2. All-gather the wires.  3. Every rank decodes all wires in the order of the ranks and averages them.
    """
    wire = codec.encode(flat)
    if residual is not None:
        codec.decode_(residual.copy_(flat), wire, alpha=-1.0, add=True)
    for rank, other in enumerate(comm.all_gather(wire)):
        codec.decode_(flat, other, alpha=1.0 / comm.size, add=rank > 0)
