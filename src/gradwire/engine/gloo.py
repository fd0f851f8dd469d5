"""Gloo: groups for lanes, with more collectives at a time than torch's own, and connections that can be closed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gradwire._torch import Store
from gradwire._torch.distributed import all_gather_base, new_gloo

THREADS = 8
"""The number of jobs in flight, and of collectives that a lane works on at once. On many ranks each waits for the last
one to send: with four jobs and torch's default of two collectives, links are idle meanwhile (for a sixth of a step at
4 hosts and 100 Mbit/s)."""

FAR_S, FAR_THREADS = 0.02, 64
"""If a message of a few bytes takes longer than FAR_S, FAR_THREADS jobs are in flight: then latency costs a step as
many round trips as one chunk takes, for up to so many chunks. On shorter latencies
it stays at eight, which take less memory."""

TAGS = 1 << 30
BRIEF = timedelta(milliseconds=1)


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
    """A gloo group outside of `torch.distributed`'s list of groups, whose connections can be closed."""

    def __init__(self, group: Any, devices: int = 1) -> None:
        super().__init__(group)
        self._rank, self._size, self.devices = self.rank(), self.size(), devices

    def close(self) -> None:
        """No collective is under way, and none will come: the group closes its connections when it is dropped."""

    def shutdown(self) -> None:
        """Close the connections: collectives under way fail at once, here and on the other ranks.

        torch's own `shutdown` does nothing for gloo, and a group that is dropped first waits until its collectives have
        ended. But gloo closes all connections of a device when one receive takes too long, so this receives what nobody
        sends. From a rank that is gone this fails in another way and closes nothing, hence the loop.
        """
        for device in range(self.devices):
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
