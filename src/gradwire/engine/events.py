"""Events: when work on an accelerator began and ended, as its streams saw it.

A host that enqueues work runs ahead of the device, so its clock says nothing about the work. An event is recorded in
the order of a stream and gets its time when the device reaches it. A meter asks whether events are done and never waits
for them: what is not done when `stats` is called counts the next time.

    backward stream   ... gradients of a bucket | arrived
    side stream            began | encode | issued ~~ collective ~~ over | decode | ended
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import torch

from gradwire.engine.lanes import Traffic
from gradwire.engine.runner import Meter
from gradwire.engine.stats import Stats

MOST_EVENTS = 4096
"""The events that one meter uses at most. A bucket of a two-shot hook takes seven, so this is enough for 14 steps of 40
buckets between the host and the device. A step that finds too few is left out of the times."""

Moment = float | torch.Event
"""A time of the host, or a place in the order of a stream."""


def now(device: torch.device) -> Moment:
    """The time; on an accelerator, when everything that is on the current stream by now will have been done."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


def seconds(began: Moment, ended: Moment) -> float:
    """The seconds from one moment to another. It waits until the device has reached the second one."""
    if isinstance(began, torch.Event) and isinstance(ended, torch.Event):
        if not ended.query():
            ended.synchronize()
        return _elapsed_s(began, ended)
    assert not isinstance(began, torch.Event)
    assert not isinstance(ended, torch.Event)
    return ended - began


def each_seconds(spans: Sequence[tuple[Moment, Moment]]) -> list[float]:
    """The seconds of several spans of one stream, in their order. It waits for the last one only."""
    return [seconds(*span) for span in reversed(spans)][::-1]


def _elapsed_s(began: torch.Event, ended: torch.Event) -> float:
    return began.elapsed_time(ended) / 1e3


@dataclass(slots=True)
class _Step:
    """The events of the jobs of one step."""

    opened: bool = True
    """False for the rest of a step whose beginning has been read already."""
    arrived: torch.Event | None = None
    """When the gradients of the last bucket were there."""
    jobs: list[Sequence[torch.Event]] = field(default_factory=list)
    lost: bool = False
    """There were too few events for it."""

    def events(self) -> list[torch.Event]:
        return [*([] if self.arrived is None else [self.arrived]), *(event for job in self.jobs for event in job)]

    def done(self) -> bool:
        """Jobs end in the order of their stream, so the last event of the last job is the last of all."""
        return not self.jobs or (self.jobs[-1][-1].query() and (self.arrived is None or self.arrived.query()))


class EventMeter(Meter):
    """A meter for work on an accelerator. The times are means over the steps whose events are done."""

    def __init__(self, device: torch.device, most_events: int = MOST_EVENTS) -> None:
        self._device, self._most = device, most_events
        self._made = 0
        self._free: list[torch.Event] = []
        self._steps_open: deque[_Step] = deque()
        super().__init__()

    def reset(self) -> None:
        """Start again from zero. Events that are still under way belong to what is forgotten."""
        with self._lock:
            super().reset()
            for step in self._steps_open:
                self._free += step.events()
            self._steps_open.clear()
            self._timed = 0

    def fresh(self) -> Self:
        """Another meter of the same kind, at zero."""
        return type(self)(self._device, self._most)

    def begin(self, first: bool) -> None:
        """A bucket has arrived on the current stream."""
        super().begin(first)
        with self._lock:
            self._read(all_steps=False)
            if first or not self._steps_open:
                self._steps_open.append(_Step(opened=first))
            step = self._steps_open[-1]
            if step.arrived is not None:
                self._free.append(step.arrived)
            step.arrived = self.recorded()
            step.lost |= step.arrived is None

    def job(self) -> JobEvents:
        """The events of a job that begins now, on the current stream."""
        return JobEvents(self)

    def add_events(self, traffic: Traffic, events: Sequence[torch.Event | None]) -> None:
        """A job has been enqueued."""
        recorded = [event for event in events if event is not None]
        with self._lock:
            self.count(traffic)
            if not self._steps_open:
                self._steps_open.append(_Step(opened=False))
            step = self._steps_open[-1]
            if len(recorded) < len(events):
                step.lost = True
                self._free += recorded
            else:
                step.jobs.append(recorded)

    def stats(self, hook: str, reason: str = "", kernels: str = "") -> Stats:
        """Averages so far. It does not wait for the device."""
        with self._lock:
            self._read(all_steps=True)
            return super().stats(hook, reason, kernels)

    def timed_steps(self) -> int:
        """The steps whose events were done."""
        return self._timed

    def recorded(self) -> torch.Event | None:
        """An event at this place of the current stream; None if there are too many already."""
        with self._lock:
            if self._free:
                event = self._free.pop()
            elif self._made < self._most:
                event = torch.Event(device=self._device, enable_timing=True)
                self._made += 1
            else:
                return None
            event.record()
            return event

    def _read(self, *, all_steps: bool) -> None:
        """Add up the steps that are done, in order; the last one only with `all_steps`, as it may go on."""
        while len(self._steps_open) > (0 if all_steps else 1) and self._steps_open[0].done():
            step = self._steps_open.popleft()
            if step.jobs and not step.lost:
                self._add_up(step)
            self._free += step.events()

    def _add_up(self, step: _Step) -> None:
        for job in step.jobs:
            encode_s, *rest_s = [_elapsed_s(*pair) for pair in pairwise(job)]
            self._encode += encode_s
            self._wire += sum(rest_s[0::2])
            self._decode += sum(rest_s[1::2])
        if step.arrived is not None:
            self._waited += max(_elapsed_s(step.arrived, step.jobs[-1][-1]), 0.0)
        self._timed += step.opened


class JobEvents:
    """The events of one job: when it began, around each of its collectives, and when it ended."""

    def __init__(self, meter: EventMeter) -> None:
        self._meter = meter
        self._events: list[torch.Event | None] = []

    def mark(self) -> None:
        """Record an event on the current stream."""
        self._events.append(self._meter.recorded())

    def end(self, traffic: Traffic) -> None:
        """The job has been enqueued."""
        self.mark()
        self._meter.add_events(traffic, self._events)
