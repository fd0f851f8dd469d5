"""Gloo: the collectives of a gloo group by faster ways than torch's own.

gloo's all-to-all sends directly from the caller's memory and receives directly into it. Its all-gather is a ring with
memory of its own and a copy at the end, and its all-reduce goes round the ring twice. Between two processes of one
host these three take 0.7, 0.7 and 2.8 ms for 1 kB and 0.7, 3.1 and 2.7 ms for 256 kB, with CPU times in the same ratio.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gradwire._torch import Store
from gradwire._torch.distributed import all_gather_base, new_gloo
from gradwire.kernels.memory import empty

THREADS = 8
"""The number of jobs in flight, and of collectives that a lane works on at once. On many ranks each waits for the last
one to send: with four jobs and torch's default of two collectives, links are idle meanwhile (for a sixth of a step at
4 hosts and 100 Mbit/s)."""

FAR_S, FAR_THREADS = 0.02, 64
"""If a message of a few bytes takes longer than FAR_S, FAR_THREADS jobs are in flight: then latency costs a step as
many round trips as one chunk takes, for up to so many chunks. On shorter latencies
it stays at eight, which take less memory."""

SMALL_BYTES = 1 << 18
"""Between two ranks, sums of up to this size are gathered and added by each rank: the same bytes, less waiting."""

LARGE_BYTES = 3 << 17
"""Between two ranks, each side of a gather above this size announces that it is ready to receive before it sends.
gloo's all-to-all sends first: the announcement of the later rank waits behind its own message, so the two directions
do not overlap (6% of a step at 100 Mbit/s). Shorter gathers use the all-to-all, which takes less CPU time."""

TAGS = 1 << 30
BRIEF = timedelta(milliseconds=1)
SHORT_SUM, LONG_GATHER = "small_all_reduce", "large_all_gather"


def way(collective: str, size: int, sent_bytes: float) -> str:
    """The name under which the cost of a collective is measured: some take another way depending on their size."""
    if collective == "all_reduce" and size == 2 and sent_bytes <= SMALL_BYTES:
        return SHORT_SUM
    if collective == "all_gather" and size == 2 and sent_bytes > LARGE_BYTES:
        return LONG_GATHER
    return collective


def jobs_in_flight(latency_s: float) -> int:
    """How many jobs are in flight if a message of a few bytes to all ranks takes so long."""
    return FAR_THREADS if latency_s > FAR_S else THREADS


def new_group(store: Store, rank: int, size: int, timeout: timedelta, jobs: int = THREADS) -> Gloo:
    """A gloo group as torch makes it, on the same interfaces, but with more collectives at a time: one of each job."""
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    threads = jobs if size > 2 or jobs > THREADS else 2
    return Gloo(new_gloo(store, rank, size, named, threads, timeout), max(1, len(named)))


class TorchGroup:
    """The collectives of a group of torch, as `GroupComm` uses them. Each returns work to wait for."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        """This rank."""
        return int(self._group.rank())

    def size(self) -> int:
        """The number of ranks."""
        return int(self._group.size())

    def all_reduce(self, tensor: Tensor) -> Any:
        """Sum, in place."""
        return self._group.allreduce([tensor])

    def all_gather(self, out: Tensor, tensor: Tensor) -> Any:
        """(n,) on each rank -> (size * n,)."""
        return all_gather_base(self._group, out, tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Any:
        """(size, n) -> (size, n)."""
        return self._group.alltoall_base(out, tensor, [], [])


class Gloo(TorchGroup):
    """The collectives of a gloo group, by faster ways where there is one."""

    def __init__(self, group: Any, devices: int = 1) -> None:
        super().__init__(group)
        self._rank, self._size, self._devices = self.rank(), self.size(), devices
        self._tag = 0

    def all_reduce(self, tensor: Tensor) -> Any:
        """Sum, in place."""
        if self._size != 2 or not _is_plain(tensor) or tensor.numel() * tensor.element_size() > SMALL_BYTES:
            return super().all_reduce(tensor)
        other = empty(tensor.shape, tensor.dtype, tensor.device)
        work = self._swap(_as_bytes(other), _as_bytes(tensor))
        return Then(work, lambda: tensor.add_(other))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Any:
        """(n,) on each rank -> (size * n,)."""
        if not _is_plain(tensor):
            return super().all_gather(out, tensor)
        rows, mine = _as_bytes(out).view(self._size, -1), _as_bytes(tensor)
        if self._size == 2:
            if rows[self._rank].data_ptr() != mine.data_ptr():
                rows[self._rank].copy_(mine)
            swap = self._swap if mine.numel() <= LARGE_BYTES else self._swap_at_once
            return swap(rows[1 - self._rank], mine)
        return self._group.alltoall_base(rows, empty(rows.shape, rows.dtype, rows.device).copy_(mine), [], [])

    def shutdown(self) -> None:
        """Close the connections: collectives under way fail at once, here and on the other ranks.

        torch's own `shutdown` does nothing for gloo, and a group that is dropped first waits until its collectives have
        ended. But gloo closes all connections of a device when one receive takes too long, so this receives what nobody
        sends. From a rank that is gone this fails in another way and closes nothing, hence the loop.
        """
        for device in range(self._devices):
            for other in (rank for rank in range(self._size) if rank != self._rank):
                if self._times_out(other, TAGS + device):
                    break

    def _times_out(self, other: int, tag: int) -> bool:
        """Whether a receive waits in vain for a rank that is there. torch chooses the device by the tag."""
        try:
            self._group.recv([torch.empty(1)], other, tag).wait(BRIEF)
        except RuntimeError as error:
            return "timed out" in str(error).lower()
        return False

    def _swap(self, theirs: Tensor, mine: Tensor) -> Any:
        """Between two ranks: an all-to-all in which no rank sends to itself."""
        sizes = [mine.numel(), 0] if self._rank else [0, mine.numel()]
        return self._group.alltoall_base(theirs, mine, sizes, sizes)

    def _swap_at_once(self, theirs: Tensor, mine: Tensor) -> Any:
        """The same, but ready to receive before anything is sent. All ranks count the same calls, so the tags match."""
        other, self._tag = 1 - self._rank, (self._tag + 1) % TAGS
        received = self._group.recv([theirs], other, self._tag)
        sent = self._group.send([mine], other, self._tag)
        return Swap(received, sent.wait)


def has_ended(work: Any, within_s: float) -> bool:
    """Wait for the end of a collective, but not for longer. Its error is raised; False if it has not ended."""
    try:
        work.wait(timedelta(seconds=within_s))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()
    return True


class Then:
    """Work that continues after its collective has ended."""

    def __init__(self, work: Any, after: Callable[[], object]) -> None:
        self._work, self._after = work, after

    def wait(self, within: timedelta | None = None) -> None:
        """Wait until everything is done. If the collective has not ended in time, raise RuntimeError."""
        self._work.wait(*[within] if within else [])
        self._after()

    def is_completed(self) -> bool:
        """Whether the collective has ended."""
        return bool(self._work.is_completed())


class Swap(Then):
    """A receive, and then the send beside it. A receive that does not end in time would close all connections."""

    def wait(self, within: timedelta | None = None) -> None:
        """Wait until everything is done, up to the group's time limit."""
        super().wait()

    def is_completed(self) -> bool:
        """It always has when `wait` returns or raises."""
        return True


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_sparse and tensor.is_contiguous() and tensor.numel() > 0


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
