"""StreamRunner: on accelerators everything is enqueued on a side stream, by the thread that runs backward."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.engine.gloo import TorchGroup
from gradwire.engine.lanes import GroupComm
from gradwire.engine.runner import Job, Meter
from gradwire.errors import CLOSED, ExchangeError
from gradwire.exchanges.base import Levels


def new_future(device: torch.device) -> Future[Tensor]:
    """A future for a result on `device`. On an accelerator, waiting for it blocks the stream, not the host."""
    return Future() if device.type == "cpu" else Future(devices=[device])


def done(result: Tensor) -> Future[Tensor]:
    """A future that already has its result."""
    future = new_future(result.device)
    future.set_result(result)
    return future


class StreamRunner:
    """Runs jobs on one group, in stream order, without waiting on the host. On a CPU it runs them inline."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.meter = Meter()
        self._group, self._device = group, device
        self._levels: Sequence[Any] = ()
        self._made: dict[Levels, Sequence[Any]] = {}
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._closed = False

    def open(self, lanes: int) -> None:
        """One group serves all."""

    def split(self, levels: Levels | None) -> None:
        """Each level has a group of its own, made when it is first needed."""
        if levels is not None and levels not in self._made:
            self._made[levels] = level_groups(self._group, levels)
        self._levels = () if levels is None else self._made[levels]

    def submit(
        self, jobs: Sequence[Job], result: Tensor, after: Callable[[], None] | None = None, *, counted: bool = True
    ) -> Future[Tensor]:
        """Enqueue the jobs now."""
        if self._closed:
            raise ExchangeError(CLOSED)
        future = new_future(self._device)
        with self._side_stream(result):
            for job in jobs:
                began = time.perf_counter()
                comm = inline_comm(self._group, self._levels)
                job(comm)
                if counted:
                    self.meter.add(comm.traffic, began, time.perf_counter())
            if after is not None:
                after()
            future.set_result(result)
        return future

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Their memory belongs to the caller's stream, which would use it again while a job still needs it."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def run(self, job: Job) -> None:
        """Enqueue one job."""
        self.submit([job], torch.empty(0, device=self._device), counted=False).wait()

    def close(self) -> None:
        """The group is the model's own and stays."""
        self._closed = True

    def _side_stream(self, result: Tensor) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        result.record_stream(self._stream)
        return torch.get_device_module(self._device).stream(self._stream)  # type: ignore[no-any-return]


def inline_comm(group: Any, levels: Sequence[Any] = ()) -> GroupComm:
    """Collectives on one group, issued by the calling thread, in stream order."""

    def run(lane: int, issue: Callable[[Any], Any]) -> tuple[float, float]:
        issued = time.perf_counter()
        issue(TorchGroup(group)).wait()  # on an accelerator this makes the stream wait, not the host
        return 0.0, time.perf_counter() - issued

    made = GroupComm(group.rank(), group.size(), run)
    made.levels = tuple(inline_comm(part) for part in levels)
    for part in made.levels:
        part.traffic = made.traffic
    return made


def level_groups(group: dist.ProcessGroup, levels: Levels) -> tuple[Any, ...]:
    """This rank's groups inside its node and across the nodes. Only the members of a group make it."""
    ranks, (node, place) = dist.get_process_group_ranks(group), divmod(group.rank(), levels.node)
    inside, across = ranks[node * levels.node :][: levels.node], ranks[place :: levels.node]
    return tuple(dist.new_group(part, use_local_synchronization=True) for part in (inside, across))
