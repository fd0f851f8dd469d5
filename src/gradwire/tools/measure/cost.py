"""The cost model: how long a training step takes under a hook, from its chunks' courses, the link and the compute.

A rank is two things that are shared and one that is not:

    cpu    the backward pass, up to THREADS chunks at work, and the collectives under way, which take processor time to
           send, receive and sum; with fewer cores than that, each gets an equal share
    wire   one link; bytes leave in the order in which collectives are issued
    hops   latency, which delays a chunk but keeps nobody from sending

A collective is over when its bytes have left, its hops are done and the processor has seen to it.

Chunks go through them as the engine (`runner.py`, `comm.py`) sends them: they start in order as buckets get ready, and
the k-th collective of a chunk is issued after the k-th of the chunk before. All ranks are taken to be alike.
"""

from __future__ import annotations

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
from gradwire.tools.measure.fit import Fit
from gradwire.tools.measure.rehearse import Course, Layout, Send, rehearse


class Wire(Protocol):
    """What collectives cost: a `Link`, or what a probe has measured."""

    def cost_s(self, collective: str, size: int, sent_bytes: float) -> tuple[float, float]:
        """Waiting for hops, during which others may send, and sending, during which nobody else can."""


Toll = Mapping[str, Fit]
"""By collective: the processor time that it takes a rank, over the bytes sent (`probe`)."""
FREE: Toll = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A step without communication."""

    forward_s: float
    ready_s: tuple[float, ...]
    """When each bucket is full, from the start of backward, in the order of the buckets."""
    backward_s: float
    after_s: float = 0.0
    """The optimizer, and whatever else comes after backward."""
    cores: float = 1.0
    """That this rank has to itself."""
    threads: int = 1
    """That backward computes with."""

    def __post_init__(self) -> None:
        times = (self.forward_s, *self.ready_s, self.backward_s, self.after_s)
        if not all(0 <= value < math.inf for value in times) or list(self.ready_s) != sorted(self.ready_s):
            raise SpecError(f"compute: times must be 0 or more, and buckets get ready one after the other, got {self}")
        if self.cores <= 0 or self.threads < 1:
            raise SpecError(f"compute: a rank has more than 0 cores and at least 1 thread, got {self}")

    @property
    def step_s(self) -> float:
        """Without communication."""
        return self.forward_s + self.backward_s + self.after_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step is going to cost one rank."""

    step_s: float
    sent_bytes: float
    work_s: float
    """Encoding, summing and decoding, if nothing else ran."""
    wire_s: float
    """The link is busy for so long."""
    exposed_s: float
    """How much longer the step takes than without communication."""
    handling_s: float = 0.0
    """Processor time of the collectives."""


def predict(
    exchange: Exchange, layouts: Sequence[Layout], size: int, link: Wire, compute: Compute, toll: Toll = FREE
) -> Prediction:
    """The step time of `exchange` on `size` ranks. `layouts` are the model's buckets, in order (see `Hook.layouts`).

    Rehearses the exchange on this machine; to ask about several links, rehearse once and use `predict_step`.
    """
    return predict_step(rehearse(exchange, layouts, size), link, compute, toll)


def predict_step(buckets: Sequence[Sequence[Course]], link: Wire, compute: Compute, toll: Toll = FREE) -> Prediction:
    """The same, for courses that are known; the number of ranks is theirs."""
    if len(buckets) != len(compute.ready_s):
        raise SpecError(f"compute tells of {len(compute.ready_s)} buckets, but there are {len(buckets)}")
    courses = list(itertools.chain.from_iterable(buckets))
    sends = [send for course in courses for send in course.sends]
    over_s = _Rank(buckets, link, compute, toll).run()
    return Prediction(
        step_s=compute.forward_s + over_s + compute.after_s,
        sent_bytes=sum(send.sent_bytes for send in sends),
        work_s=sum(send.work_s for send in sends) + sum(course.work_s for course in courses),
        wire_s=sum(_cost_s(send, link)[1] for send in sends),
        exposed_s=over_s - compute.backward_s,
        handling_s=sum(_toll_s(send, toll) for send in sends),
    )


def _cost_s(send: Send, link: Wire) -> tuple[float, float]:
    return (0.0, 0.0) if send.size == 1 else link.cost_s(send.collective, send.size, send.sent_bytes)


def _toll_s(send: Send, toll: Toll) -> float:
    found = toll.get(way(send.collective, send.size, send.sent_bytes)) or toll.get(send.collective)
    return found.seconds(send.sent_bytes) if found is not None and send.size > 1 else 0.0


class _Chunk:
    """A chunk on its way: `stage` counts the collectives that it has issued."""

    def __init__(self, ticket: int, course: Course) -> None:
        self.ticket, self.course, self.stage = ticket, course, 0

    @property
    def work_s(self) -> float:
        """What is to be done before the next collective, or after the last."""
        sends = self.course.sends
        return sends[self.stage].work_s if self.stage < len(sends) else self.course.work_s


class _Rank:
    """Plays the backward pass of one rank, from event to event."""

    def __init__(self, buckets: Sequence[Sequence[Course]], link: Wire, compute: Compute, toll: Toll) -> None:
        self._link, self._compute, self._toll = link, compute, toll
        tickets = itertools.count()
        self._buckets = deque(
            (ready_s, [_Chunk(next(tickets), course) for course in courses])
            for ready_s, courses in zip(compute.ready_s, buckets, strict=True)
        )
        chunks = [chunk for _, chunks in self._buckets for chunk in chunks]
        lanes = max((len(chunk.course.sends) for chunk in chunks), default=0)
        self._turns = [deque(chunk for chunk in chunks if len(chunk.course.sends) > lane) for lane in range(lanes)]
        self._now = self._done_s = self._wire_free = 0.0
        self._queued: deque[_Chunk] = deque()
        self._working: dict[_Chunk, float] = {}
        self._handled: dict[_Chunk, float] = {}
        self._asking: set[_Chunk] = set()
        self._wires: list[tuple[float, int, _Chunk]] = []
        self._running = 0

    def run(self) -> float:
        """Until backward and all chunks are over; when that is."""
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
        """How fast everything that computes goes on: cores are shared alike."""
        threads = len(self._working) + len(self._handled) + (self._compute.threads if self._in_backward else 0)
        return min(1.0, self._compute.cores / max(threads, 1))

    def _fill(self) -> None:
        """Buckets that are full hand in their chunks; free threads take them up."""
        while self._buckets and (self._buckets[0][0] <= self._done_s + 1e-12 or not self._in_backward):
            self._queued.extend(self._buckets.popleft()[1])
        while self._queued and self._running < THREADS:
            chunk = self._queued.popleft()
            self._running += 1
            self._working[chunk] = chunk.work_s

    def _end_works(self) -> None:
        for chunk in [chunk for chunk, left in self._handled.items() if left <= 1e-12]:
            del self._handled[chunk]
        for chunk in [chunk for chunk, left in self._working.items() if left <= 1e-12]:
            del self._working[chunk]
            if chunk.stage == len(chunk.course.sends):
                self._running -= 1
            else:
                self._asking.add(chunk)
        self._issue()

    def _issue(self) -> None:
        """Every collective whose turn it is on its lane."""
        for chunk in sorted(self._asking, key=lambda chunk: chunk.ticket):
            if self._turns[chunk.stage][0] is not chunk:
                continue
            self._asking.remove(chunk)
            self._turns[chunk.stage].popleft()
            send = chunk.course.sends[chunk.stage]
            waiting_s, sending_s = _cost_s(send, self._link)
            self._wire_free = max(self._wire_free, self._now) + sending_s
            chunk.stage += 1
            self._handled[chunk] = _toll_s(send, self._toll)
            heapq.heappush(self._wires, (self._wire_free + waiting_s, chunk.ticket, chunk))

    def _end_wires(self) -> None:
        while self._wires and self._wires[0][0] <= self._now + 1e-12:
            _, _, chunk = heapq.heappop(self._wires)
            self._working[chunk] = chunk.work_s + self._handled.pop(chunk, 0.0)
