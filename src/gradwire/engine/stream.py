"""StreamRunner: on accelerators everything is enqueued on a side stream, by the thread that runs backward.

It keeps NCCL's rules. One communicator serves a group; its collectives are enqueued by one thread, in the order of the
buckets, which is the same on all ranks; groups of two levels are made by their members alone; no collective has an
empty tensor (`GroupComm`). An error is raised where it happens, and everything afterwards is refused.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire._torch import is_profiled
from gradwire.engine.events import EventMeter
from gradwire.engine.gloo import TorchGroup
from gradwire.engine.lanes import GroupComm, profiled
from gradwire.engine.runner import Job, Meter, check_usable
from gradwire.errors import ExchangeError, RegisterError
from gradwire.exchanges.base import Levels

CAPTURED = (
    "gradwire cannot be captured in a CUDA graph: every replay would use the seeds and the step number of the captured "
    "step, and count nothing. Leave the backward pass of the DDP model out of the graph"
)
SPLIT_FROM_ALL = (
    "two_level makes groups of some ranks. After init_process_group(device_id=...) NCCL splits them off the default "
    "group, and all its {world} ranks must take part, but the model's group has {size}; remove device_id, or give the "
    "model the default group"
)


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

    overlaps = False
    in_flight = 1
    """One stream runs one job after the other."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.meter = Meter() if device.type == "cpu" else EventMeter(device)
        self._group, self._device = group, device
        self._levels: Sequence[Any] = ()
        self._made: dict[Levels, Sequence[Any]] = {}
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._closed = False
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise ExchangeError if the current stream is being captured in a graph."""
        if self._device.type != "cpu":
            is_capturing = getattr(torch.get_device_module(self._device), "is_current_stream_capturing", None)
            if is_capturing is not None and is_capturing():
                raise ExchangeError(CAPTURED)

    def open(self, lanes: int) -> None:
        """One group serves all."""

    def split(self, levels: Levels | None) -> None:
        """Each level has a group of its own, made when it is first needed."""
        if levels is not None and levels not in self._made:
            self._made[levels] = level_groups(self._group, levels)
        self._levels = () if levels is None else self._made[levels]

    def submit(
        self,
        jobs: Sequence[Job],
        result: Tensor,
        after: Callable[[], None] | None = None,
        *,
        counted: bool = True,
        what: str = "",
    ) -> Future[Tensor]:
        """Enqueue the jobs now. An error is raised at once, and this runner is not used again."""
        check_usable(self._closed, self._error)
        self.check()
        future = new_future(self._device)
        try:
            with self._side_stream(result):
                for chunk, job in enumerate(jobs):
                    self._run_one(profiled(job, f"{what}, chunk {chunk}") if is_profiled() else job, counted)
                if after is not None:
                    after()
                future.set_result(result)
        except BaseException as error:
            self._error = error
            raise
        return future

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Their memory belongs to the caller's stream, which would use it again while a job still needs it."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def run(self, job: Job) -> None:
        """Enqueue one job."""
        self.submit([job], torch.empty(0, device=self._device), counted=False).wait()

    def give_up(self, error: BaseException) -> None:
        """The group is the model's own: its backend notices."""

    def explained(self, error: RuntimeError, what: str) -> BaseException:
        """The error itself."""
        return error

    def close(self) -> None:
        """The group is the model's own and stays."""
        self._closed = True

    def _run_one(self, job: Job, counted: bool) -> None:
        if counted and isinstance(self.meter, EventMeter):
            events = self.meter.job()
            events.mark()
            comm = inline_comm(self._group, self._levels, events.mark)
            job(comm)
            events.end(comm.traffic)
            return
        began, comm = time.perf_counter(), inline_comm(self._group, self._levels)
        job(comm)
        if counted:
            self.meter.add(comm.traffic, began, time.perf_counter())

    def _side_stream(self, result: Tensor) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        result.record_stream(self._stream)
        return torch.get_device_module(self._device).stream(self._stream)  # type: ignore[no-any-return]


def inline_comm(group: Any, levels: Sequence[Any] = (), mark: Callable[[], None] = lambda: None) -> GroupComm:
    """Collectives on one group, issued by the calling thread, in stream order. `mark` is called before and after each.

    On an accelerator, waiting for a collective makes the stream wait, not the host.
    """

    def run(lane: int, issue: Callable[[Any], Any]) -> tuple[float, float]:
        mark()
        issued = time.perf_counter()
        issue(TorchGroup(group)).wait()
        mark()
        return 0.0, time.perf_counter() - issued

    made = GroupComm(group.rank(), group.size(), run)
    made.levels = tuple(inline_comm(part, mark=mark) for part in levels)
    for part in made.levels:
        part.traffic = made.traffic
    return made


def level_groups(group: dist.ProcessGroup, levels: Levels) -> tuple[Any, ...]:
    """This rank's groups inside its node and across the nodes. Only the members of a group make it."""
    ranks, (node, place) = dist.get_process_group_ranks(group), divmod(group.rank(), levels.node)
    if len(ranks) < (world := dist.get_world_size()) and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        raise RegisterError(SPLIT_FROM_ALL.format(world=world, size=len(ranks)))
    backend = dist.get_backend_config(group)  # by default a new group has that of the default group
    inside, across = ranks[node * levels.node :][: levels.node], ranks[place :: levels.node]
    return tuple(dist.new_group(part, backend=backend, use_local_synchronization=True) for part in (inside, across))
