"""rehearse(): a real hook averages buckets of the model's shapes without any other rank.

The result is the trace of each chunk: work, then a collective of so many bytes, then work again. The hook, its exchange
and its codecs are the ones that train, so the bytes are exact for every exchange, and the measured work includes
everything: feedback, exempt tensors, low-rank products, calls from Python.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.engine.events import Moment, now, seconds
from gradwire.engine.fingerprint import sealed
from gradwire.engine.hook import Hook
from gradwire.engine.lanes import GroupComm
from gradwire.engine.runner import Job, Meter
from gradwire.engine.sharded import ShardedHook
from gradwire.engine.stream import done
from gradwire.errors import SpecError
from gradwire.exchanges import Exact, Exchange
from gradwire.exchanges.base import Levels
from gradwire.exchanges.bucket import Bucket, Segment
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.sharded import Shard
from gradwire.kernels.memory import Scratch

BucketLayout = tuple[Segment, ...]
"""The tensors of one bucket, as in `Hook.layouts`."""
STEPS = 4
COLD_BYTES = 64 << 20
"""Read before every bucket to empty the caches, as the backward pass does between buckets in training."""
CPU = torch.device("cpu")
MOST_BYTES = 4 << 30
"""No real set-up receives more than this in one collective."""


@dataclass(frozen=True, slots=True)
class Send:
    """A collective, and the work before it."""

    work_s: float
    collective: str
    size: int
    """The ranks that take part; 1 if it stays inside a node (`two_level`), which is assumed to cost nothing."""
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What one chunk does: its collectives in order, and the work after the last one."""

    sends: tuple[Send, ...]
    work_s: float

    @property
    def sent_bytes(self) -> float:
        """The bytes that one rank sends."""
        return sum(send.sent_bytes for send in self.sends)


def rehearse(
    exchange: Exchange,
    layouts: Iterable[BucketLayout],
    size: int,
    *,
    steps: int = STEPS,
    at_step: int = 0,
    chunk_bytes: int | None = None,
    device: torch.device = CPU,
) -> list[list[Trace]]:
    """Average buckets without any other rank, and record what rank 0 would do.

    Args:
        exchange: What averages.
        layouts: The model's buckets, in order; those with the same layout are rehearsed once.
        size: The number of ranks.
        steps: How often each bucket is averaged.
        at_step: The number of steps before, for exchanges that change over time.
        chunk_bytes: As for `gradwire.register`.
        device: Where the gradients are.

    Returns:
        For each bucket, the traces of its chunks. The times are those of this machine with the threads that torch uses
        now, or those of an accelerator.

    Examples:
        >>> gradwire.advisor.rehearse(gradwire.exchange("int8"), buckets, 4)[0][0].sent_bytes
    """
    known: dict[object, list[Trace]] = {}
    traces = []
    other = torch.zeros(COLD_BYTES // 4, device=device)
    for layout in layouts:
        key = tuple((part.name, tuple(part.param.shape), part.param.dtype, part.start, part.numel) for part in layout)
        if key not in known:
            known[key] = _rehearse_bucket(exchange, layout, size, steps, at_step, chunk_bytes, other)
        traces.append(known[key])
    return traces


# -- models with fully_shard -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The messages of one unit: one call of `fully_shard`."""

    shards: tuple[Shard, ...]
    gathered: torch.dtype = torch.float32
    """The type in which its parameters are gathered."""
    reduced: torch.dtype = torch.float32
    """The type in which its gradients are reduced."""

    @property
    def row(self) -> int:
        """The values that each rank owns."""
        return sum(shard.padded.numel() for shard in self.shards)


def rehearse_scatter(each: Exchange, units: Iterable[UnitLayout], size: int) -> list[list[Trace]]:
    """The traces of every unit's reduce-scatter on `size` ranks, with `exact` as gloo does it: as an all-reduce."""

    def plain(unit: UnitLayout) -> list[Trace]:
        sent = 2 * (size - 1) * unit.row * unit.reduced.itemsize
        return [Trace((Send(0.0, "all_reduce", size, sent),), 0.0)]

    def run(hook: ShardedHook, unit: UnitLayout) -> None:
        rows = _normal(size, unit.row, unit.reduced)
        names = [shard.name for shard in unit.shards]
        hook.begin_backward(0, first=True)
        hook.scatter(0, rows, torch.empty_like(rows[0]), names, 1 / size, lambda: None).wait()

    return _rehearse_units(each, Exact(), units, size, run, plain)


def rehearse_gather(each: Exchange, units: Iterable[UnitLayout], size: int) -> list[list[Trace]]:
    """The same for the gather of every unit's parameters."""

    def plain(unit: UnitLayout) -> list[Trace]:
        sent = (size - 1) * unit.row * unit.gathered.itemsize
        return [Trace((Send(0.0, "all_gather", size, sent),), 0.0)]

    def run(hook: ShardedHook, unit: UnitLayout) -> None:
        rows = _normal(size, unit.row, unit.gathered)
        hook.gather_rows(0, rows, tuple(shard.segment for shard in unit.shards)).wait()

    return _rehearse_units(Exact(), each, units, size, run, plain)


def _rehearse_units(
    scatters: Exchange,
    gathers: Exchange,
    units: Iterable[UnitLayout],
    size: int,
    run: Callable[[ShardedHook, UnitLayout], None],
    plain: Callable[[UnitLayout], list[Trace]],
) -> list[list[Trace]]:
    known: dict[object, list[Trace]] = {}
    traces, other = [], torch.zeros(COLD_BYTES // 4)
    for unit in units:
        key = tuple((shard.whole, shard.padded) for shard in unit.shards), unit.gathered, unit.reduced
        if not isinstance(scatters, Coded) and not isinstance(gathers, Coded):
            known[key] = plain(unit) if scatters.averages else []
        elif key not in known:
            known[key] = _rehearse_unit(scatters, gathers, unit, size, run, other)
        traces.append(known[key])
    return traces


def _rehearse_unit(
    scatters: Exchange,
    gathers: Exchange,
    unit: UnitLayout,
    size: int,
    run: Callable[[ShardedHook, UnitLayout], None],
    other: Tensor,
) -> list[Trace]:
    runner = _DryRunner(size, CPU)
    options: dict[str, Any] = {"rank": 0, "size": size, "device": CPU}
    hook = ShardedHook(scatters, runner, gather=gathers, gather_runner=runner, shards=unit.shards, **options)
    taken = []
    for _ in range(STEPS):
        other.add_(1)
        runner.traces = []
        run(hook, unit)
        taken.append(runner.traces)
    hook.close()
    return [_typical(same) for same in zip(*taken, strict=True)]


def _normal(size: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, numel, generator=torch.Generator().manual_seed(0)).to(dtype)


# -- a run without other ranks -----------------------------------------------------------------------------------------


def _rehearse_bucket(
    exchange: Exchange,
    layout: BucketLayout,
    size: int,
    steps: int,
    at_step: int,
    chunk_bytes: int | None,
    other: Tensor,
) -> list[Trace]:
    runner = _DryRunner(size, other.device)
    hook = Hook(exchange, runner, rank=0, size=size, device=other.device, chunk_bytes=chunk_bytes)
    hook.load_state_dict(sealed({**hook.state_dict(), "step": at_step}))
    values = _values(layout).to(other.device)
    taken = []
    for _ in range(steps):
        bucket = Bucket(0, values.clone(), layout, is_last=True)
        other.add_(1)
        runner.traces = []
        hook.begin(bucket)
        hook.mean(bucket).wait()
        taken.append(runner.traces)
    hook.close()
    alike = [traces for traces in taken if _shape(traces) == _shape(taken[-1])]
    return [_typical(same) for same in zip(*alike, strict=True)]


def _values(layout: BucketLayout) -> Tensor:
    dtype = layout[0].param.dtype.to_real()
    numel = sum(part.numel for part in layout)
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)


def _shape(traces: Sequence[Trace]) -> list[list[str]]:
    return [[send.collective for send in trace.sends] for trace in traces]


def _typical(same: Sequence[Trace]) -> Trace:
    """The median work over the steps, as the first one touches new memory, and the mean bytes."""
    sends = [
        Send(
            statistics.median(send.work_s for send in column),
            column[0].collective,
            column[0].size,
            sum(send.sent_bytes for send in column) / len(column),
        )
        for column in zip(*(trace.sends for trace in same), strict=True)
    ]
    return Trace(tuple(sends), statistics.median(trace.work_s for trace in same))


class _DryRunner:
    """Runs jobs immediately, without other ranks, and records their traces."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.meter = Meter()
        self.overlaps = device.type == "cpu"
        self.in_flight = 1
        self.traces: list[Trace] = []
        self._size, self._device = size, device
        self._levels: Levels | None = None
        self._scratch = Scratch()

    def check(self) -> None:
        """A step can begin at any time."""

    def open(self, lanes: int) -> None:
        """No lanes are needed."""

    def split(self, levels: Levels | None) -> None:
        """No groups are needed, but jobs ask for their levels."""
        self._levels = levels

    def submit(
        self,
        jobs: Sequence[Job],
        result: Tensor,
        after: Callable[[], None] | None = None,
        *,
        counted: bool = True,
        what: str = "",
    ) -> Future[Tensor]:
        """Run the jobs now."""
        for job in jobs:
            log, began = _Log(self._device), time.perf_counter()
            comm = _DryComm(self._size, log, self._levels)
            with self._scratch.job():
                job(comm)
            self.traces.append(log.trace())
            if counted:
                self.meter.add(comm.traffic, began, time.perf_counter())
        if after is not None:
            after()
        return done(result)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Jobs run on the caller's stream."""

    def run(self, job: Job) -> None:
        """All ranks would send the same, so one rank is enough."""
        job(_DryComm(1, _Log(self._device)))

    def give_up(self, error: BaseException) -> None:
        """There is nobody to tell."""

    def explained(self, error: RuntimeError, what: str) -> BaseException:
        """The error itself."""
        return error

    def close(self) -> None:
        """There is nothing to close."""


_Both = tuple[Moment, float]
"""A moment, and the CPU time of this process until then."""


class _Log:
    """Records what one chunk does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sends: list[tuple[_Both, _Both, tuple[str, int, float]]] = []
        self.resume()

    def resume(self) -> None:
        """Work continues."""
        self._since = self._now()

    def add(self, collective: str, size: int, sent_bytes: float) -> None:
        """A collective begins, and work stops."""
        self._sends.append((self._since, self._now(), (collective, size, sent_bytes)))

    def trace(self) -> Trace:
        """The whole trace. It waits for an accelerator."""
        rest_s = _worked_s(self._since, self._now())
        return Trace(tuple(Send(_worked_s(began, ended), *what) for began, ended, what in self._sends), rest_s)

    def _now(self) -> _Both:
        return now(self._device), time.process_time()


def _worked_s(began: _Both, ended: _Both) -> float:
    """How long work takes that has a core for each of its threads.

    While ranks that share the cores rehearse too, more time passes than this process computes; with several threads it
    computes for longer than time passes. An accelerator works by itself, and is not disturbed by other ranks.
    """
    passed_s = seconds(began[0], ended[0])
    return passed_s if isinstance(began[0], torch.Event) else min(passed_s, ended[1] - began[1])


class _DryComm(GroupComm):
    """Counts bytes as the real one does; it receives what another rank could have sent."""

    def __init__(self, size: int, log: _Log, levels: Levels | None = None, *, inside: bool = False) -> None:
        super().__init__(0, size, lambda lane, issue: (0.0, 0.0))
        self._log, self._inside = log, inside
        if levels is not None:
            self.levels = _DryComm(levels.node, log, inside=True), _DryComm(size // levels.node, log)
            for part in self.levels:
                part.traffic = self.traffic

    def rows(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """SpecError for what does not fit in memory."""
        if (nbytes := self.size * numel * dtype.itemsize) > MOST_BYTES:
            raise SpecError(
                f"on {self.size} ranks one chunk would receive {nbytes / 1e9:.0f} GB; use shots=auto, or fewer ranks"
            )
        return super().rows(numel, dtype, device)

    def _collect(self, name: str, issue: Callable[[Any], Any], moved_bytes: float) -> None:
        self._log.add(name, 1 if self._inside else self.size, moved_bytes)
        super()._collect(name, issue, moved_bytes)
        issue(_Mirror(self.size))
        self._log.resume()


class _Mirror:
    """Stands in for a process group in which every other rank sends what this one does."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum is not needed."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Every other rank sends the same."""
        rows, own = out.view(self._size, -1), tensor.view(1, -1)
        if rows.data_ptr() != own.data_ptr():
            rows[:1].copy_(own)
        rows[1:].copy_(own.expand(self._size - 1, -1))

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Repeat the last row: exchanges need not fill row 0, which they would send to themselves."""
        out.copy_(tensor[-1:].expand_as(tensor))
