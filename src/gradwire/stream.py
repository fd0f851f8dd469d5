"""Step 9, on accelerators: everything is enqueued on a side stream, by the thread that runs backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Levels, inline_comm, level_groups
from gradwire.errors import CLOSED, ExchangeError
from gradwire.runner import Job, Report


def new_future(device: torch.device) -> Future[Tensor]:
    """For a result on `device`: on an accelerator, whoever waits for it waits on its stream."""
    return Future() if device.type == "cpu" else Future(devices=[device])


def done(result: Tensor) -> Future[Tensor]:
    """A future that has its result."""
    future = new_future(result.device)
    future.set_result(result)
    return future


class StreamRunner:
    """Everything on one group, in stream order, without waiting on the host. On a CPU it simply runs inline."""

    def __init__(self, group: Any, device: torch.device) -> None:
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
        self, jobs: Sequence[Job], result: Tensor, report: Report, after: Callable[[], None] | None = None
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
                report(comm.traffic, began, time.perf_counter())
            if after is not None:
                after()
            future.set_result(result)
        return future

    def run(self, job: Job) -> None:
        """Enqueue one job."""
        self.submit([job], torch.empty(0, device=self._device), lambda *_: None).wait()

    def close(self) -> None:
        """The group is the model's own and stays."""
        self._closed = True

    def _side_stream(self, result: Tensor) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        result.record_stream(self._stream)
        return torch.get_device_module(self._device).stream(self._stream)  # type: ignore[no-any-return]
