"""Simulation: every rank's `mean_` in a thread of this process, with collectives in memory.

It is the reference of exchanges that declare none. There are no chunks, no lanes and no backend, so it shows what the
engine does wrong; what `mean_` itself does wrong, only `Exchange.reference` and `Exchange.bound` show.
"""

import copy
import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gradwire.exchanges.base import Exchange
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.reference import Reference, join


class MemoryComm:
    """The collectives of one rank, among threads. See `exchanges.base.Comm`."""

    def __init__(self, rank: int, board: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self.levels = ()
        self.off = 0.0
        """How far a backend's result may be off, as it may add up in another order."""
        self._board, self._barrier = board, barrier

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum in the order of the ranks."""
        rows = self.all_gather(tensor.reshape(-1))
        if self.size > 2:
            self.off += self.size * torch.finfo(tensor.dtype).eps * float(rows.double().abs().sum(0).max())
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return tensor.copy_(total.view(tensor.shape))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Everybody's tensor."""
        self._board[self.rank] = tensor.detach().clone()
        self._barrier.wait()
        rows = torch.stack(self._board)
        self._barrier.wait()
        return rows

    def rows(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Work space."""
        return torch.empty((self.size, numel), dtype=dtype, device=device)

    def all_gather_(self, rows: Tensor) -> Tensor:
        """Everybody's row."""
        return rows.copy_(self.all_gather(rows[self.rank]))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Everybody's row for this rank."""
        return self.all_gather(tensor)[:, self.rank].contiguous()


def simulate(exchange: Exchange, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None = None) -> Reference:
    """The result of `mean_` on the buckets of all ranks, which stay as they are; `memory` is updated."""
    board, barrier = [torch.empty(0)] * len(buckets), threading.Barrier(len(buckets))
    comms = [MemoryComm(rank, board, barrier) for rank in range(len(buckets))]
    memory = buckets[0].memory
    owns = [dataclasses.replace(b, flat=b.flat.clone(), memory=copy.deepcopy(memory)) for b in buckets]
    left = None if residuals is None else tuple(residual.clone() for residual in residuals)

    def run(rank: int) -> None:
        try:
            exchange.mean_(owns[rank], comms[rank], None if left is None else left[rank])
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(buckets)) as threads:
        for future in [threads.submit(run, rank) for rank in range(len(buckets))]:
            future.result()
    if memory is not None:
        memory.update(owns[0].memory or {})
    return Reference(owns[0].flat, torch.tensor(comms[0].off), left)


def expected(
    exchange: Exchange, chunks: Sequence[Sequence[Bucket]], residuals: Sequence[Tensor] | None = None
) -> Reference | None:
    """The reference of a bucket that the engine cuts into `chunks` (of each rank, in order); None if there is none.

    An exchange without a reference of its own is simulated, unless it works on two levels.
    """
    parts, at = [], 0
    for pieces in zip(*chunks, strict=True):
        numel = pieces[0].flat.numel()
        own = None if residuals is None else [residual[at : at + numel] for residual in residuals]
        part = exchange.reference(pieces, own)
        if part is None and exchange.levels(len(pieces)) is not None:
            return None
        parts.append(simulate(exchange, pieces, own) if part is None else part)
        at += numel
    return join(parts)
