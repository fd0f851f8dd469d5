"""Times steps of models with `fully_shard` with all, some and no communication, in a training that stays the same.

A gather cannot be left out, nor can a reduction be put off in all modes of FSDP2. But on the CPU FSDP2's collectives
block, so it is enough to stop the clock: in a step *without* gathers every gather is made as always, and its time is
taken off. So every step trains on the same gradients and parameters, bit for bit. A step lasts from the first gather of
one forward pass to the first gather of the forward pass after the next reduction.

With FSDP2's own HSDP (a 2-D mesh), gradients are averaged across replicas after their reduction, which blocks too. Its
time is that from the end of the reduction to FSDP2's all-reduce hook, which is called next.

Steps without any communication give a timeline as well: what is requested when, on a clock that stands still during
collectives. The cost model predicts other hooks from it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from gradwire._torch.fsdp import Unit, Waited
from gradwire._torch.optim import NO_BACKWARD, at_end_of_backward, backward_id
from gradwire.engine.events import Moment
from gradwire.errors import RegisterError
from gradwire.models.ddp import backend_name
from gradwire.models.fsdp import Gather, Scatter
from gradwire.models.sharded_checks import check_units, units_of
from gradwire.tools.launch.link import EmulatedLink
from gradwire.tools.measure.alternate import ORDER, Clock

GATHERS, REDUCTIONS, REPLICAS = "gathers", "reductions", "replicas"
KINDS = (frozenset[str](), frozenset({REDUCTIONS}), frozenset({GATHERS}), frozenset({GATHERS, REDUCTIONS}))
"""What a step of each kind is timed without."""
REPLICA_KINDS = (
    frozenset[str](),
    frozenset({REPLICAS}),
    frozenset({GATHERS}),
    frozenset({GATHERS, REDUCTIONS, REPLICAS}),
)
"""The same for a model with replicas. All its collectives block, so that reductions take what is left."""
PLACES = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
"""The kinds of the steps of four rounds: each kind is in each place once, and before each other kind once."""


def kind_of(at: int) -> int:
    """The number of the kind of a timed step. Every other four rounds, and so on, have the opposite order."""
    number, place = divmod(at, len(ORDER))
    order = PLACES[number % len(PLACES)]
    return order[::-1][place] if (number // len(PLACES)).bit_count() % 2 else order[place]


class Event(NamedTuple):
    """Something that FSDP2 does in a step."""

    what: str
    """`gather`: parameters are requested. `need`: they are used from here on. `reduce`: gradients are reduced, and the
    result is used at once; `reduce_late`: not before the end of the backward pass. `end`: of the backward pass."""
    unit: int
    at_s: float
    """On a clock that stands still during collectives, from the begin of the step."""
    took_s: float
    """What the collective has taken."""


class Timeline(NamedTuple):
    """A step without communication."""

    step_s: float
    events: tuple[Event, ...]

    @classmethod
    def from_json(cls, found: Any) -> Timeline | None:
        """From what JSON makes of it."""
        return None if found is None else cls(found[0], tuple(Event(*event) for event in found[1]))

    def slower(self, factor: float) -> Timeline:
        """The same step, in which everything that it computes takes `factor` times as long."""
        events = tuple(event._replace(at_s=factor * event.at_s) for event in self.events)
        return Timeline(factor * self.step_s, events)


def typical(steps: Sequence[Timeline]) -> Timeline | None:
    """The medians over the steps in which the same things happen in the same order, which most do."""
    orders = Counter(_order(step) for step in steps)
    if not orders:
        return None
    most = orders.most_common(1)[0][0]
    alike = [step for step in steps if _order(step) == most]
    events = [
        Event(column[0].what, column[0].unit, _median(e.at_s for e in column), _median(e.took_s for e in column))
        for column in zip(*(step.events for step in alike), strict=True)
    ]
    return Timeline(_median(step.step_s for step in alike), tuple(events))


def _order(step: Timeline) -> tuple[tuple[str, int], ...]:
    return tuple((event.what, event.unit) for event in step.events)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


class ShardedClock(Clock):
    """Times steps of four kinds, and keeps the timelines of those without communication."""

    def __init__(self, steps: int, publish: Callable[[list[float], Timeline | None], None]) -> None:
        super().__init__(steps, lambda times, _: publish(times, typical(self._timelines)))
        self.kinds = KINDS
        self._left_out = KINDS[0]
        self._events: list[Event] | None = None
        self._off_s = 0.0
        """How long the clock has stood still in this step."""
        self._timelines: list[Timeline] = []

    def _end(self) -> None:
        if self._events:
            self._timelines.append(Timeline(self._elapsed_s(), tuple(self._events)))

    def _start(self, at: int | None) -> None:
        self._left_out = self.kinds[0] if at is None else self.kinds[kind_of(at)]
        self._events, self._off_s = ([] if self._left_out == self.kinds[-1] else None), 0.0

    def run(self, model: object, direction: str, what: str, unit: int, collective: Callable[[], Any]) -> Any:
        """Run a collective of a model, and stop the clock meanwhile if this step is timed without it."""
        at_s = self._elapsed_s()
        began = perf_counter()
        result = collective()
        if direction in self._left_out:
            if isinstance(result, dist.Work):  # requested in advance by the script: it must not end while time counts
                result.wait()
            self._note(model, Event(what, unit, at_s, self.took(direction, began)))
        return result

    def took(self, direction: str, began: float) -> float:
        """A collective has blocked since then: do not count it if this step is timed without it. Its time."""
        ended = perf_counter()
        if direction in self._left_out:
            self.stopped(began, ended)
            self._off_s += ended - began
        return ended - began

    def note(self, model: object, what: str, unit: int) -> None:
        """Something else happens."""
        self._note(model, Event(what, unit, self._elapsed_s(), 0.0))

    def _note(self, model: object, event: Event) -> None:
        if self._events is not None and model is self._lead:
            self._events.append(event)

    def _elapsed_s(self) -> float:
        since: Moment = self._since
        return (perf_counter() - since if isinstance(since, float) else 0.0) - self._off_s


class AlternatingSharded:
    """The collectives of one model with `fully_shard`, timed."""

    def __init__(self, model: nn.Module, clock: ShardedClock, link: EmulatedLink | None) -> None:
        units = units_of(model)
        _check_free(units)
        check_units(units, native=True)
        mesh = units[0].replica_mesh
        self.group, self._device, self._clock, self._link = units[0].shard_group, units[0].device, clock, link
        self.across: dist.ProcessGroup | None = None if mesh is None else mesh.get_group(0)
        if self._device.type != "cpu":
            raise RegisterError(
                f"headroom and advise time models with fully_shard on the CPU only, where its collectives block, and "
                f"this one is on {self._device.type!r}. There, compare the step times of gradwire.register(model, "
                "spec) with those of plain FSDP2; gradwire simulate predicts them from the time of a step on one rank"
            )
        if self.across is not None:
            clock.kinds, clock.more_groups = REPLICA_KINDS, (self.across,)
        self._sums = backend_name(self.group, self._device) == "gloo"
        self._has_reduced, self._ends_at, self._reduced_at = True, NO_BACKWARD, 0.0
        self._average = self.average  # one object, by which the units' hook can be recognised
        for index, unit in enumerate(units):
            self._place(index, unit)

    @property
    def rank(self) -> int:
        """This rank among all that train the model."""
        return self.group.rank() + (0 if self.across is None else self.across.rank() * self.group.size())

    @property
    def ranks(self) -> int:
        """All ranks that train the model."""
        return self.group.size() * (1 if self.across is None else self.across.size())

    def _place(self, index: int, unit: Unit) -> None:
        own_gather, own_scatter, _ = unit.comms

        def gather(output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
            self._begin()
            sent = input_tensor.nbytes * (group.size() - 1)
            plain = self._held("all_gather", sent, lambda: own_gather(output_tensor, input_tensor, group, async_op))
            work = self._clock.run(self, GATHERS, "gather", index, plain)
            return Waited(lambda: self._needed(index, work))

        def scatter(output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any) -> None:
            self._reduces()
            late = unit.uses_result_late(unit.names, output_tensor.dtype, self._average)
            sent = (1 + self._sums) * input_tensor.nbytes * (group.size() - 1) / group.size()
            how = "all_reduce" if self._sums else "all_to_all"
            plain = self._held(how, sent, lambda: own_scatter(output_tensor, input_tensor, group, op))
            what = "reduce_late" if late and backward_id() != NO_BACKWARD else "reduce"
            self._clock.run(self, REDUCTIONS, what, index, plain)
            self._reduced_at = perf_counter()

        unit.module.set_custom_all_gather(Gather(gather, own_gather))
        unit.module.set_custom_reduce_scatter(Scatter(scatter, own_scatter))
        if self.across is not None:
            unit.module.set_all_reduce_hook(self._average)

    def average(self, reduced: Tensor) -> None:
        """FSDP2 has just averaged a unit's gradients across the replicas."""
        assert self.across is not None
        if self._link is not None:
            size, spent_s = self.across.size(), perf_counter() - self._reduced_at
            self._link.hold("all_reduce", size, 2 * reduced.nbytes * (size - 1) / size, spent_s)
        self._clock.took(REPLICAS, self._reduced_at)

    def _begin(self) -> None:
        if self._has_reduced and backward_id() == NO_BACKWARD:
            self._has_reduced = False
            self._clock.begin_step(self, self.group, self._device)

    def _reduces(self) -> None:
        self._has_reduced = True
        if (here := backward_id()) not in (self._ends_at, NO_BACKWARD):
            self._ends_at = here
            at_end_of_backward(lambda: self._clock.note(self, "end", 0))

    def _needed(self, index: int, work: Any) -> None:
        if isinstance(work, dist.Work):
            work.wait()
        self._clock.note(self, "need", index)

    def _held(self, collective: str, sent_bytes: float, plain: Callable[[], Any]) -> Callable[[], Any]:
        """The collective at the speed of the emulated link. With replicas, that is the one between them."""
        link = self._link
        if link is None or self.across is not None:
            return plain

        def run() -> Any:
            began = perf_counter()
            result = plain()
            link.hold(collective, self.group.size(), sent_bytes, perf_counter() - began)
            return result

        return run


def _check_free(units: Sequence[Unit]) -> None:
    """RegisterError if the script itself has registered a hook of gradwire."""
    if any(type(comm).__module__.startswith("gradwire.") for unit in units for comm in unit.comms):
        raise RegisterError(
            "headroom and advise time a training without gradwire, but the script has given this model a hook; remove "
            "gradwire.register from it, and instead of gradwire.hsdp call fully_shard with the 2-D mesh"
        )
