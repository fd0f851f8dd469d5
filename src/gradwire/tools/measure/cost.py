"""The cost model: predicts the time of a training step under a hook from its traces, the link and the compute.

A rank consists of two shared resources and one that is not shared:

    cpu    the backward pass, up to THREADS chunks at work, and the collectives under way, which need CPU time to send,
           receive and sum; with fewer cores than that, each gets an equal share
    wire   one link; bytes leave in the order in which collectives are issued
    hops   latency, which delays a chunk but does not stop others from sending

A collective is over when its bytes have left, its hops are done and its CPU work is finished.

Chunks use these resources as in the engine (`runner.py`, `lanes.py`): they start in order as buckets get ready, and the
k-th collective of a chunk is issued after the k-th collective of the chunk before. All ranks are assumed to be alike.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from gradwire.engine.gloo import THREADS, way
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


def predict(
    exchange: Exchange,
    layouts: Sequence[BucketLayout],
    size: int,
    link: Wire,
    compute: Compute,
    cpu_cost: CpuCost = NO_CPU_COST,
) -> Prediction:
    """Predict the step time of `exchange` on `size` ranks.

    `layouts` are the model's buckets, in order (see `Hook.layouts`). The exchange is rehearsed on this machine; for
    several links, rehearse it once and call `predict_step`.
    """
    return predict_step(rehearse(exchange, layouts, size), link, compute, cpu_cost)


def predict_step(
    buckets: Sequence[Sequence[Trace]],
    link: Wire,
    compute: Compute,
    cpu_cost: CpuCost = NO_CPU_COST,
    *,
    at_once: int = THREADS,
) -> Prediction:
    """The same for known traces, which fix the number of ranks. At most `at_once` chunks are under way."""
    if len(buckets) != len(compute.ready_s):
        raise SpecError(f"compute has times for {len(compute.ready_s)} buckets, but there are {len(buckets)}")
    traces = list(itertools.chain.from_iterable(buckets))
    sends = [send for trace in traces for send in trace.sends]
    over_s = _Rank(buckets, link, compute, cpu_cost, at_once).run()
    return Prediction(
        step_s=compute.forward_s + over_s + compute.after_s,
        sent_bytes=sum(send.sent_bytes for send in sends),
        work_s=sum(send.work_s for send in sends) + sum(trace.work_s for trace in traces),
        wire_s=sum(_cost_s(send, link)[1] for send in sends),
        exposed_s=over_s - compute.backward_s,
        handling_s=sum(_cpu_cost_s(send, cpu_cost) for send in sends),
    )


def _cost_s(send: Send, link: Wire) -> tuple[float, float]:
    return (0.0, 0.0) if send.size == 1 else link.cost_s(send.collective, send.size, send.sent_bytes)


def _cpu_cost_s(send: Send, cpu_cost: CpuCost) -> float:
    found = cpu_cost.get(way(send.collective, send.size, send.sent_bytes)) or cpu_cost.get(send.collective)
    return found.seconds(send.sent_bytes) if found is not None and send.size > 1 else 0.0


class _Chunk:
    """A chunk in flight: `stage` is the number of collectives that it has issued."""

    def __init__(self, ticket: int, trace: Trace) -> None:
        self.ticket, self.trace, self.stage = ticket, trace, 0

    @property
    def work_s(self) -> float:
        """The work before the next collective, or after the last one."""
        sends = self.trace.sends
        return sends[self.stage].work_s if self.stage < len(sends) else self.trace.work_s


class _Rank:
    """Simulates the backward pass of one rank, from event to event."""

    def __init__(
        self, buckets: Sequence[Sequence[Trace]], link: Wire, compute: Compute, cpu_cost: CpuCost, at_once: int
    ) -> None:
        self._link, self._compute, self._cpu_cost, self._at_once = link, compute, cpu_cost, at_once
        tickets = itertools.count()
        self._buckets = deque(
            (ready_s, [_Chunk(next(tickets), trace) for trace in traces])
            for ready_s, traces in zip(compute.ready_s, buckets, strict=True)
        )
        chunks = [chunk for _, chunks in self._buckets for chunk in chunks]
        lanes = max((len(chunk.trace.sends) for chunk in chunks), default=0)
        self._turns = [deque(chunk for chunk in chunks if len(chunk.trace.sends) > lane) for lane in range(lanes)]
        self._now = self._done_s = self._wire_free = 0.0
        self._queued: deque[_Chunk] = deque()
        self._working: dict[_Chunk, float] = {}
        self._handled: dict[_Chunk, float] = {}
        self._asking: set[_Chunk] = set()
        self._wires: list[tuple[float, int, _Chunk]] = []
        self._running = 0

    def run(self) -> float:
        """Run until backward and all chunks are over, and return when that is."""
        for dt in self._steps():
            rate = self._rate()
            self._now += dt
            self._done_s += dt * rate if self._in_backward else 0.0
            for busy in (self._working, self._handled):
                for chunk in busy:
                    busy[chunk] -= dt * rate
            self._end_works()
            self._end_wires()
            self._fill()
        return self._now

    def _steps(self) -> Iterator[float]:
        """The time to each next event."""
        self._fill()
        while True:
            rate = self._rate()
            times = [left / rate for left in (*self._working.values(), *self._handled.values())]
            if self._in_backward:
                times.append((self._next_milestone - self._done_s) / rate)
            if self._wires:
                times.append(self._wires[0][0] - self._now)
            if not times:
                return
            yield max(min(times), 0.0)

    @property
    def _next_milestone(self) -> float:
        ready_s = self._buckets[0][0] if self._buckets else math.inf
        return min(ready_s, self._compute.backward_s)

    @property
    def _in_backward(self) -> bool:
        return self._compute.backward_s - self._done_s > 1e-12

    def _rate(self) -> float:
        """The speed of everything that computes: cores are shared equally."""
        threads = len(self._working) + len(self._handled) + (self._compute.threads if self._in_backward else 0)
        return min(1.0, self._compute.cores / max(threads, 1))

    def _fill(self) -> None:
        """Full buckets submit their chunks, and free threads start them."""
        while self._buckets and (self._buckets[0][0] <= self._done_s + 1e-12 or not self._in_backward):
            self._queued.extend(self._buckets.popleft()[1])
        while self._queued and self._running < self._at_once:
            chunk = self._queued.popleft()
            self._running += 1
            self._working[chunk] = chunk.work_s

    def _end_works(self) -> None:
        for chunk in [chunk for chunk, left in self._handled.items() if left <= 1e-12]:
            del self._handled[chunk]
        for chunk in [chunk for chunk, left in self._working.items() if left <= 1e-12]:
            del self._working[chunk]
            if chunk.stage == len(chunk.trace.sends):
                self._running -= 1
            else:
                self._asking.add(chunk)
        self._issue()

    def _issue(self) -> None:
        """Issue every collective whose turn it is on its lane."""
        for chunk in sorted(self._asking, key=lambda chunk: chunk.ticket):
            if self._turns[chunk.stage][0] is not chunk:
                continue
            self._asking.remove(chunk)
            self._turns[chunk.stage].popleft()
            send = chunk.trace.sends[chunk.stage]
            waiting_s, sending_s = _cost_s(send, self._link)
            self._wire_free = max(self._wire_free, self._now) + sending_s
            chunk.stage += 1
            self._handled[chunk] = _cpu_cost_s(send, self._cpu_cost)
            heapq.heappush(self._wires, (self._wire_free + waiting_s, chunk.ticket, chunk))

    def _end_wires(self) -> None:
        while self._wires and self._wires[0][0] <= self._now + 1e-12:
            _, _, chunk = heapq.heappop(self._wires)
            self._working[chunk] = chunk.work_s + self._handled.pop(chunk, 0.0)
