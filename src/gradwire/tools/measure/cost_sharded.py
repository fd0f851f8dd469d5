"""The cost model for models with `fully_shard`: predicts a step from its timeline and the traces of both directions.

FSDP2 requests parameters, needs them, and reduces gradients unit by unit (see `alternate_sharded.Timeline`). With a
codec, gathers run beside whatever happens until the parameters are needed, and up to MOST_PENDING reductions run beside
the backward pass; FSDP2's own collectives block. The two directions have engines of their own and share the wire.
Averages across replicas begin when their reduction is over, and are waited for at the end of the backward pass.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire.models.fsdp import MOST_PENDING
from gradwire.tools.measure.alternate_sharded import Event, Timeline
from gradwire.tools.measure.cost import (
    NO_CPU_COST,
    CpuCost,
    Engine,
    Idle,
    Op,
    Prediction,
    Submit,
    Wait,
    Work,
    run_program,
)
from gradwire.tools.measure.rehearse import Trace


@dataclass(frozen=True, slots=True)
class Direction:
    """How one direction communicates."""

    traces: Sequence[Sequence[Trace]]
    """By unit: what a message of the unit does."""
    engine: Engine
    blocks: bool = False
    """It is a collective of FSDP2's own, which blocks."""
    measured: bool = False
    """It takes the time that it has taken in the timeline."""

    def bytes_of(self, unit: int) -> float:
        """What a rank sends in a message of a unit."""
        return sum(trace.sent_bytes for trace in self.traces[unit])


def predict_sharded(
    timeline: Timeline,
    scatters: Direction,
    gathers: Direction,
    replicas: Direction | None = None,
    *,
    cores: float = 1.0,
    threads: int = 1,
    cpu_cost: CpuCost = NO_CPU_COST,
    crowd: float = 1.0,
) -> tuple[Prediction, float]:
    """The prediction of a step, and the part of its bytes that parameters take."""
    program = [*_Program(scatters, gathers, replicas).ops(timeline)]
    step_s = run_program(program, cores, threads, cpu_cost, crowd)
    gathered = [event.unit for event in timeline.events if event.what == "gather"]
    reduced = [event.unit for event in timeline.events if event.what.startswith("reduce")]
    used = [(gathers, unit) for unit in gathered]
    used += [(each, unit) for unit in reduced for each in (scatters, replicas) if each is not None]
    traces = [trace for each, unit in used for trace in each.traces[unit]]
    parameters = sum(gathers.bytes_of(unit) for unit in gathered)
    prediction = Prediction(
        step_s=step_s,
        sent_bytes=sum(trace.sent_bytes for trace in traces),
        work_s=sum(trace.work_s + sum(send.work_s for send in trace.sends) for trace in traces),
        wire_s=sum(_sending_s(each, unit) for each, unit in used),
        exposed_s=step_s - timeline.step_s,
    )
    return prediction, parameters


def _sending_s(each: Direction, unit: int) -> float:
    sends = [send for trace in each.traces[unit] for send in trace.sends if send.size > 1]
    return sum(each.engine.link.cost_s(send.collective, send.size, send.sent_bytes)[1] for send in sends)


class _Program:
    """What the thread that trains does in a step. It waits where `gradwire.models.fsdp` does."""

    def __init__(self, scatters: Direction, gathers: Direction, replicas: Direction | None) -> None:
        self._scatters, self._gathers, self._replicas = scatters, gathers, replicas
        self._pending: deque[tuple[int, Event]] = deque()
        """Reductions under way, by their number."""
        self._averages: list[Wait] = []
        """Averages across replicas that are under way."""

    def ops(self, timeline: Timeline) -> Iterator[Op]:
        """The whole step."""
        done_s = 0.0
        for number, event in enumerate(timeline.events):
            yield Work(max(event.at_s - done_s, 0.0))
            done_s = max(event.at_s, done_s)
            yield from self._event(number, event)
        yield Work(max(timeline.step_s - done_s, 0.0))

    def _event(self, number: int, event: Event) -> Iterator[Op]:
        if event.what == "gather":
            yield from _message(self._gathers, event, ("gather", event.unit), waits=self._gathers.blocks)
        elif event.what == "need":
            yield Wait(("gather", event.unit))
        elif event.what == "reduce_late":
            yield from _message(self._scatters, event, ("reduce", number), waits=self._scatters.blocks)
            self._pending.append((number, event))
            yield from self._drain(0 if self._scatters.blocks else MOST_PENDING)
        else:
            yield from self._finish()
            if event.what == "reduce":
                yield from _message(self._scatters, event, ("reduce", number), waits=True)
                yield from self._average(number, event)
                yield from self._finish()

    def _drain(self, most: int) -> Iterator[Op]:
        """Wait for the oldest reductions until at most so many are under way; their averages begin then."""
        while len(self._pending) > most:
            number, event = self._pending.popleft()
            yield Wait(("reduce", number))
            yield from self._average(number, event)

    def _average(self, number: int, event: Event) -> Iterator[Op]:
        if self._replicas is not None:
            yield from _message(self._replicas, event, ("average", number), waits=False)
            self._averages.append(Wait(("average", number)))

    def _finish(self) -> Iterator[Op]:
        yield from self._drain(0)
        yield from self._averages
        self._averages = []


def _message(each: Direction, event: Event, key: tuple[str, int], *, waits: bool) -> Iterator[Op]:
    if each.measured:
        yield Idle(event.took_s)
        return
    yield Submit(key, each.traces[event.unit], each.engine)
    if waits:
        yield Wait(key)
