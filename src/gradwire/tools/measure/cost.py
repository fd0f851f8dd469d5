"""The cost model: predicts the time of a training step under a hook from its traces, the link and the compute.

A rank consists of two shared resources and one that is not shared:

    cpu    the backward pass, up to THREADS chunks at work, and the collectives under way, which need CPU time to send,
           receive and sum; with fewer cores than that, each gets an equal share. Ranks that share cores are busy at the
           same time, so all work takes as many times as long as was measured while all of them computed (`crowd`)
    wire   one link; bytes leave in the order in which collectives are issued
    hops   latency, which delays a chunk but does not stop others from sending

A collective is over when its bytes have left, its hops are done and its CPU work is finished.

Chunks use these resources as in the engine (`runner.py`, `lanes.py`): they start in order as buckets get ready, and the
k-th collective of a chunk is issued after the k-th collective of the chunk before. All ranks are assumed to be alike.

What the thread of the script does is a program: it computes, submits chunks to an engine, and waits for them. A step of
DDP submits buckets and waits at the end; for a step of FSDP2 see `cost_sharded.py`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from gradwire.engine.gloo import THREADS, jobs_in_flight
from gradwire.engine.links import way
from gradwire.errors import SpecError
from gradwire.exchanges import Exchange
from gradwire.tools.measure.compute import Compute
from gradwire.tools.measure.fit import Fit
from gradwire.tools.measure.rehearse import BucketLayout, Send, Trace, rehearse


class Wire(Protocol):
    """What collectives cost: a `Link`, or a measured `Probe`."""

    def cost_s(self, collective: str, size: int, sent_bytes: float) -> tuple[float, float]:
        """Seconds of waiting for hops, while other collectives may send, and of sending, while no other can."""


CpuCost = Mapping[str, Fit]
"""By collective: the CPU time that it takes a rank, as a function of the bytes sent (measured by `probe`)."""
NO_CPU_COST: CpuCost = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step costs one rank."""

    step_s: float
    sent_bytes: float
    work_s: float
    """Encoding, summing and decoding, if nothing else runs."""
    wire_s: float
    """How long the link is busy."""
    exposed_s: float
    """How much longer the step takes than without communication."""
    handling_s: float = 0.0
    """CPU time of the collectives."""
    uncertainty: float = 0.0
    """How far `step_s` may be off, as a part of it, if that was estimated (`uncertainty.py`)."""


def predict(
    exchange: Exchange,
    layouts: Sequence[BucketLayout],
    size: int,
    link: Wire,
    compute: Compute,
    cpu_cost: CpuCost = NO_CPU_COST,
) -> Prediction:
    """Predict the step time of an exchange.

    The exchange is rehearsed on this machine; for several links, rehearse it once and call `predict_step`.

    Args:
        exchange: What averages.
        layouts: The model's buckets, in order (see `Hook.layouts`).
        size: The number of ranks.
        link: A `Link`, or the result of `probe`.
        compute: What a step computes, from `measure_compute`.
        cpu_cost: The CPU time of collectives, `cpu_cost` of a `probe`; without it they take none.

    Returns:
        The time of a step and its parts.

    Examples:
        >>> link = gradwire.advisor.Link.parse("1gbit")
        >>> gradwire.advisor.predict(gradwire.exchange("int8"), buckets, 4, link, compute).step_s
    """
    return predict_step(rehearse(exchange, layouts, size), link, compute, cpu_cost)


def predict_step(
    buckets: Sequence[Sequence[Trace]],
    link: Wire,
    compute: Compute,
    cpu_cost: CpuCost = NO_CPU_COST,
    *,
    at_once: int | None = None,
) -> Prediction:
    """Predict the step time from known traces.

    Args:
        buckets: The traces of each bucket's chunks, from `rehearse`. They fix the number of ranks.
        link: As for `predict`.
        compute: As for `predict`.
        cpu_cost: As for `predict`.
        at_once: The largest number of chunks that are under way; by default what the engine chooses for the latency.

    Returns:
        The time of a step and its parts.

    Examples:
        >>> traces = gradwire.advisor.rehearse(gradwire.exchange("int8"), buckets, 4)
        >>> gradwire.advisor.predict_step(traces, gradwire.advisor.Link.parse("1gbit"), compute).step_s
    """
    if len(buckets) != len(compute.ready_s):
        raise SpecError(f"compute has times for {len(compute.ready_s)} buckets, but there are {len(buckets)}")
    traces = list(itertools.chain.from_iterable(buckets))
    sends = [send for trace in traces for send in trace.sends]
    engine = Engine(link, at_once or _at_once(sends, link))
    over_s = run_program(_program(buckets, compute, engine), compute.cores, compute.threads, cpu_cost, compute.crowd)
    return Prediction(
        step_s=compute.forward_s + over_s + compute.after_s,
        sent_bytes=sum(send.sent_bytes for send in sends),
        work_s=sum(send.work_s for send in sends) + sum(trace.work_s for trace in traces),
        wire_s=sum(_cost_s(send, link)[1] for send in sends),
        exposed_s=over_s - compute.backward_s,
        handling_s=sum(_cpu_cost_s(send, cpu_cost) for send in sends),
    )


def _program(buckets: Sequence[Sequence[Trace]], compute: Compute, engine: Engine) -> list[Op]:
    """A backward pass of DDP: buckets are submitted when they are ready, and waited for at the end."""
    program: list[Op] = []
    done_s = 0.0
    for index, (ready_s, traces) in enumerate(zip(compute.ready_s, buckets, strict=True)):
        until_s = min(ready_s, compute.backward_s)
        program += [Work(until_s - done_s), Submit(index, traces, engine)]
        done_s = until_s
    return [*program, Work(compute.backward_s - done_s), *(Wait(index) for index in range(len(buckets)))]


def _at_once(sends: Sequence[Send], link: Wire) -> int:
    """How many chunks the engine keeps under way on this link."""
    size = max((send.size for send in sends), default=1)
    return THREADS if size == 1 else jobs_in_flight(link.cost_s("all_gather", size, 0.0)[0])


def _cost_s(send: Send, link: Wire) -> tuple[float, float]:
    return (0.0, 0.0) if send.size == 1 else link.cost_s(send.collective, send.size, send.sent_bytes)


def _cpu_cost_s(send: Send, cpu_cost: CpuCost) -> float:
    found = cpu_cost.get(way(send.collective, send.size, send.sent_bytes)) or cpu_cost.get(send.collective)
    return found.seconds(send.sent_bytes) if found is not None and send.size > 1 else 0.0


# -- the simulation ----------------------------------------------------------------------------------------------------


class Engine:
    """Runs chunks in the order of submission, at most `at_once` at a time. Engines with the same link share a wire."""

    def __init__(self, link: Wire, at_once: int = THREADS) -> None:
        self.link, self.at_once = link, at_once
        self.running = 0
        self.queued: deque[_Chunk] = deque()
        self.turns: list[deque[_Chunk]] = []
        """By lane: the chunks that have not issued their collective there, in order."""

    def add(self, chunk: _Chunk) -> None:
        """A chunk is submitted."""
        self.queued.append(chunk)
        for lane in range(len(chunk.trace.sends)):
            if lane == len(self.turns):
                self.turns.append(deque())
            self.turns[lane].append(chunk)


@dataclass(frozen=True, slots=True)
class Work:
    """The thread computes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Idle:
    """The thread waits for something that takes no CPU time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Submit:
    """The thread submits chunks and goes on."""

    key: Hashable
    traces: Sequence[Trace]
    engine: Engine


@dataclass(frozen=True, slots=True)
class Wait:
    """The thread waits until everything that was submitted under a key is over."""

    key: Hashable


Op = Work | Idle | Submit | Wait


def run_program(
    program: Sequence[Op], cores: float, threads: int, cpu_cost: CpuCost = NO_CPU_COST, crowd: float = 1.0
) -> float:
    """How many seconds a program takes. The thread computes with `threads` threads, and the rank has `cores`.

    Chunks and collectives take `crowd` times their work, because other ranks use the same cores. What the program
    computes was measured beside them, and takes no longer than that.
    """
    return _Rank(program, cores, threads, cpu_cost, crowd).run()


class _Chunk:
    """A chunk in flight: `stage` is the number of collectives that it has issued."""

    def __init__(self, ticket: int, key: Hashable, trace: Trace, engine: Engine) -> None:
        self.ticket, self.key, self.trace, self.engine = ticket, key, trace, engine
        self.stage = 0

    @property
    def work_s(self) -> float:
        """The work before the next collective, or after the last one."""
        sends = self.trace.sends
        return sends[self.stage].work_s if self.stage < len(sends) else self.trace.work_s


class _Rank:
    """Simulates the program of one rank, from event to event."""

    def __init__(self, program: Sequence[Op], cores: float, threads: int, cpu_cost: CpuCost, crowd: float) -> None:
        self._program, self._cores, self._threads, self._cpu_cost = deque(program), cores, threads, cpu_cost
        self._crowd = crowd
        self._tickets = itertools.count()
        self._now = 0.0
        self._left: float | None = None
        """What is left of the program's first operation, if it has begun."""
        self._pending: Counter[Hashable] = Counter()
        """How many chunks are under way, by key."""
        self._wire_free: dict[int, float] = {}
        self._engines: list[Engine] = []
        self._working: dict[_Chunk, float] = {}
        self._handled: dict[_Chunk, float] = {}
        self._asking: set[_Chunk] = set()
        self._wires: list[tuple[float, int, _Chunk]] = []

    def run(self) -> float:
        """Run until the program and all chunks are over, and return when that is."""
        for dt in self._steps():
            rate = self._rate()
            self._now += dt
            if self._left is not None:
                self._left -= dt * (rate if self._computes else 1.0)
            for busy in (self._working, self._handled):
                for chunk in busy:
                    busy[chunk] -= dt * rate
            self._end_works()
            self._end_wires()
            self._go_on()
        return self._now

    def _steps(self) -> Iterator[float]:
        """The time to each next event."""
        self._go_on()
        while True:
            rate = self._rate()
            times = [left / rate for left in (*self._working.values(), *self._handled.values())]
            if self._left is not None:
                times.append(self._left / rate if self._computes else self._left)
            if self._wires:
                times.append(self._wires[0][0] - self._now)
            if not times:
                return
            yield max(min(times), 0.0)

    @property
    def _computes(self) -> bool:
        return bool(self._program) and isinstance(self._program[0], Work)

    def _rate(self) -> float:
        """The speed of everything that computes: cores are shared equally."""
        threads = len(self._working) + len(self._handled) + (self._threads if self._computes else 0)
        return min(1.0, self._cores / max(threads, 1))

    def _go_on(self) -> None:
        """The program goes on as far as it can, and free threads of the engines start chunks."""
        while self._program and self._is_over(op := self._program[0]):
            self._program.popleft()
            self._left = None
            if isinstance(op, Submit):
                self._submit(op)
        for engine in self._engines:
            while engine.queued and engine.running < engine.at_once:
                chunk = engine.queued.popleft()
                engine.running += 1
                self._working[chunk] = self._crowd * chunk.work_s

    def _is_over(self, op: Op) -> bool:
        """Whether the first operation is over; one that takes time is begun."""
        if isinstance(op, Wait):
            return not self._pending[op.key]
        if isinstance(op, Submit):
            return True
        self._left = op.seconds if self._left is None else self._left
        return self._left <= 1e-12

    def _submit(self, op: Submit) -> None:
        if op.engine not in self._engines:
            self._engines.append(op.engine)
        self._pending[op.key] += len(op.traces)
        for trace in op.traces:
            op.engine.add(_Chunk(next(self._tickets), op.key, trace, op.engine))

    def _end_works(self) -> None:
        for chunk in [chunk for chunk, left in self._handled.items() if left <= 1e-12]:
            del self._handled[chunk]
        for chunk in [chunk for chunk, left in self._working.items() if left <= 1e-12]:
            del self._working[chunk]
            if chunk.stage == len(chunk.trace.sends):
                chunk.engine.running -= 1
                self._pending[chunk.key] -= 1
            else:
                self._asking.add(chunk)
        self._issue()

    def _issue(self) -> None:
        """Issue every collective whose turn it is on its lane."""
        for chunk in sorted(self._asking, key=lambda chunk: chunk.ticket):
            turns = chunk.engine.turns[chunk.stage]
            if turns[0] is not chunk:
                continue
            self._asking.remove(chunk)
            turns.popleft()
            send, link = chunk.trace.sends[chunk.stage], chunk.engine.link
            waiting_s, sending_s = _cost_s(send, link)
            free_s = max(self._wire_free.get(id(link), 0.0), self._now) + sending_s
            self._wire_free[id(link)] = free_s
            chunk.stage += 1
            self._handled[chunk] = self._crowd * _cpu_cost_s(send, self._cpu_cost)
            heapq.heappush(self._wires, (free_s + waiting_s, chunk.ticket, chunk))

    def _end_wires(self) -> None:
        while self._wires and self._wires[0][0] <= self._now + 1e-12:
            _, _, chunk = heapq.heappop(self._wires)
            self._working[chunk] = self._crowd * chunk.work_s + self._handled.pop(chunk, 0.0)
