"""The cost model for models with `fully_shard`: predicts a step from its timeline and the traces of both directions.

FSDP2 requests parameters, needs them, and reduces gradients unit by unit (see `alternate_sharded.Timeline`). With a
codec, gathers run beside whatever happens until the parameters are needed, and up to MOST_PENDING reductions run beside
the backward pass; FSDP2's own collectives block. The two directions have engines of their own and share the wire.
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
) -> tuple[Prediction, float]:
    """The prediction of a step, and the part of its bytes that parameters take."""
    program = [*_program(timeline, scatters, gathers, replicas)]
    step_s = run_program(program, cores, threads, cpu_cost)
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


def _program(timeline: Timeline, scatters: Direction, gathers: Direction, replicas: Direction | None) -> Iterator[Op]:
    """What the thread that trains does in a step."""
    done_s, pending = 0.0, deque[object]()
    for number, event in enumerate(timeline.events):
        yield Work(max(event.at_s - done_s, 0.0))
        done_s = max(event.at_s, done_s)
        if event.what == "gather":
            yield from _message(gathers, event, ("gather", event.unit), waits=gathers.blocks)
        elif event.what == "need":
            yield Wait(("gather", event.unit))
        elif event.what == "reduce_late" and not scatters.blocks and replicas is None:
            pending.append(("reduce", number))
            yield from _message(scatters, event, ("reduce", number), waits=False)
            yield from _drain(pending, MOST_PENDING)
        else:
            yield from _drain(pending, 0)
            if event.what != "end":
                yield from _message(scatters, event, ("reduce", number), waits=True)
                yield from [] if replicas is None else _message(replicas, event, ("average", number), waits=True)
    yield Work(max(timeline.step_s - done_s, 0.0))


def _message(each: Direction, event: Event, key: tuple[str, int], *, waits: bool) -> Iterator[Op]:
    if each.measured:
        yield Idle(event.took_s)
        return
    yield Submit(key, each.traces[event.unit], each.engine)
    if waits:
        yield Wait(key)


def _drain(pending: deque[object], most: int) -> Iterator[Op]:
    """Wait for the oldest reductions until at most so many are under way."""
    while len(pending) > most:
        yield Wait(pending.popleft())
