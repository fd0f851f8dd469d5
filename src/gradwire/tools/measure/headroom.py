"""headroom(): what no hook can do better than. The step time with communication, and without any.

`alternate.py` says how both are taken from one and the same training, which is not changed by it.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import RegisterError, SpecError
from gradwire.tools.launch import Plan, Script, ScriptFailed, follow
from gradwire.tools.launch.link import Link
from gradwire.tools.launch.plan import new_plan
from gradwire.tools.measure.alternate import (
    ORDER,
    UNSEEN,
    WARM_UP,
    Alternating,
    Backward,
    Clock,
    alternating_hook,
    communicates,
)

STEPS = 80
BOUND = 0.10
"""Less exposed communication than this part of a step, and the network is not what holds a run back."""
MIN_ROUNDS, SURE_ROUNDS, FEW = 2, 4, 6
EXTRA_STEPS = 2
"""The built-in script takes so many more than are timed: a step ends when the next begins."""
ONE_RANK = "there is no communication to measure; take --nproc 2 or more"

_clocks: dict[str, Clock] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """Step times, the slowest rank's each, from complete rounds of ORDER."""

    with_s: tuple[float, ...]
    """Steps with communication."""
    without_s: tuple[float, ...]
    """Steps without."""
    ranks: int
    link: str | None
    """None: as it is."""
    wanted_steps: int
    """Of both kinds together."""
    backward: Backward = UNSEEN
    """Of rank 0, the median one without communication."""

    @property
    def exposed_s(self) -> float:
        """How much longer communication makes a step: the median over the rounds."""
        return statistics.median(self._differences())

    @property
    def exposed(self) -> float:
        """The same as a part of the round's steps with communication."""
        return statistics.median(self._parts())

    @property
    def exposed_between(self) -> tuple[float, float]:
        """A 95% interval around it; of fewer than `FEW` rounds all that was seen, which is less sure."""
        return median_interval(self._parts())

    @property
    def ceiling(self) -> float:
        """How many times as fast the run would be with a hook that takes no time at all."""
        return 1 / (1 - max(self.exposed, 0.0))

    @property
    def is_network_bound(self) -> bool:
        """Whether there is something to gain."""
        return self.exposed >= BOUND

    @property
    def is_certain(self) -> bool:
        """Whether there are rounds enough, and the interval lies on one side of BOUND."""
        low, high = self.exposed_between
        return len(self.rounds()) >= SURE_ROUNDS and (low >= BOUND) == (high >= BOUND)

    def verdict(self) -> str:
        """In a sentence or two."""
        if self.is_network_bound:
            text = (
                f"Network-bound: communication takes {self.exposed:.0%} of a step, and a hook can make this run up to "
                f"{self.ceiling:.2f}x as fast."
            )
        else:
            text = (
                f"Not network-bound: communication takes {max(self.exposed, 0):.0%} of a step, less than {BOUND:.0%}, "
                f"so no hook can make this run more than {self.ceiling:.2f}x as fast. Leave it as it is."
            )
        if self.is_certain:
            return text
        why = "vary too much" if len(self.rounds()) >= SURE_ROUNDS else "are too few"
        return f"{text} The steps {why} to be sure: measure more of them with --steps {2 * self.wanted_steps}."

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "ranks": self.ranks,
            "link": self.link,
            "with_communication": _summary(self.with_s),
            "without_communication": _summary(self.without_s),
            "exposed_s": self.exposed_s,
            "exposed": self.exposed,
            "exposed_between": list(self.exposed_between),
            "ceiling": self.ceiling,
            "is_network_bound": self.is_network_bound,
            "is_certain": self.is_certain,
            "verdict": self.verdict(),
        }

    def _differences(self) -> list[float]:
        return [with_s - without_s for with_s, without_s in self.rounds()]

    def _parts(self) -> list[float]:
        return [1 - without_s / with_s for with_s, without_s in self.rounds()]

    def rounds(self) -> list[tuple[float, float]]:
        """The mean of the steps with communication, and of those without.

        If there are enough, of two rounds together, of which one is the other way round (`communicates`).
        """
        each = 4 if len(self.with_s) >= 4 * SURE_ROUNDS else 2
        starts = range(0, len(self.with_s) // each * each, each)
        means = ([statistics.mean(times[at : at + each]) for at in starts] for times in (self.with_s, self.without_s))
        return list(zip(*means, strict=True))


def headroom(
    script: Script | None = None,
    *,
    steps: int = STEPS,
    link: str | None = None,
    nproc: int | None = None,
    torchrun: Sequence[str] = (),
    stop: bool = False,
    report: Callable[[float, str], None] = lambda part, doing: None,
    tell: Callable[[Headroom], None] | None = None,
) -> Headroom | None:
    """Time `steps` steps of a script, by default of the built-in GPT on 2 ranks, while it trains as ever.

    With `stop` the script is ended as soon as that is done. `nproc` and `torchrun` say how ranks are started; inside a
    launcher the script runs in this process, and all ranks but the first return None. `report` is told the part done,
    and `tell` the result as soon as there is one, whatever becomes of the script then; inside a launcher, at its end.
    SpecError before anything starts for what cannot be measured, such as one rank.
    """
    if steps < MIN_ROUNDS * len(ORDER):
        raise SpecError(f"steps must be at least {MIN_ROUNDS * len(ORDER)}, got {steps}")
    if nproc == 1 and not _has_nodes(torchrun):
        raise SpecError(f"nproc is 1: {ONE_RANK}")
    job = {"steps": steps, "link": None if link is None else str(Link.parse(link))}
    if script is None:
        nproc = local_ranks(nproc)
        script = Script(
            "gradwire.tools.measure.builtin", (str(WARM_UP + steps + len(ORDER) + EXTRA_STEPS),), module=True
        )

    told: list[bool] = []
    with new_plan("headroom", "gradwire.tools.measure.headroom:timed", job) as plan:

        def enough() -> bool:
            notes = plan.notes("times")
            done = len((_first(notes) or max(notes, key=_steps, default={"times": []}))["times"])
            report(min(done / steps, 1.0), f"step {done} of {steps}" if done else "warming up")
            if tell is not None and not told and done >= steps:
                told.append(True)
                if (found := _result(plan)) is not None:
                    tell(found)
            return stop and done >= steps

        try:
            follow(plan, script, nproc, torchrun, enough=enough)
        except ScriptFailed:  # after the last timed step, perhaps: what is known is told all the same
            enough()
            raise
        return _result(plan)


def local_ranks(nproc: int | None) -> int | None:
    """Of the built-in script: 2, unless a launcher has started this process as a rank already."""
    return 2 if nproc is None and "RANK" not in os.environ else nproc


def _has_nodes(torchrun: Sequence[str]) -> bool:
    """Whether these options ask for several nodes. A range of nodes counts: the model's group will tell."""
    return any(option.startswith("--nnodes") for option in torchrun) and "--nnodes=1" not in torchrun


def timed(model: DistributedDataParallel, plan: Plan) -> None:
    """Time a model of the script, and leave a note after every round."""
    group, note = model.process_group, plan.new_note("times")
    if group.size() == 1 and plan.folder not in _clocks:  # now, and not after all steps
        raise RegisterError(f"the model's process group has one rank: {ONE_RANK}")

    def publish(times: list[float], backward: Backward) -> None:
        plan.write(note, {"rank": group.rank(), "ranks": group.size(), "times": times, **backward._asdict()})

    if plan.folder not in _clocks:
        _clocks[plan.folder] = Clock(plan.job["steps"], publish)
        publish([], UNSEEN)
    model.register_comm_hook(Alternating(model, _clocks[plan.folder], plan.job["link"]), alternating_hook)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which the median of what `values` are a sample of lies with 95%; all of them, if they are few."""
    ordered, count = sorted(values), len(values)
    skip = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[skip], ordered[count - 1 - skip]


def _first(notes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Rank 0's, of the model that it has timed most steps of."""
    return max((note for note in notes if note["rank"] == 0), key=_steps, default=None)


def _steps(note: dict[str, Any]) -> int:
    return len(note["times"])


def _result(plan: Plan) -> Headroom | None:
    notes = plan.notes("times")
    if not notes:
        raise ScriptFailed("the script ended, but it never built a torch.nn.parallel.DistributedDataParallel")
    first = _first(notes)
    if first is None:  # it runs elsewhere, and tells there
        return None
    times, ranks = first["times"], first["ranks"]
    if len(times) < MIN_ROUNDS * len(ORDER):
        need = WARM_UP + MIN_ROUNDS * len(ORDER) + 1
        raise ScriptFailed(f"the script trained too few steps to say anything: let it train at least {need}")
    kinds = [communicates(at) for at in range(len(times))]
    return Headroom(
        with_s=tuple(time_s for time_s, kind in zip(times, kinds, strict=True) if kind),
        without_s=tuple(time_s for time_s, kind in zip(times, kinds, strict=True) if not kind),
        ranks=ranks,
        link=plan.job["link"],
        wanted_steps=plan.job["steps"],
        backward=Backward(first["backward_s"], first["came_s"]),
    )


def _summary(times_s: Sequence[float]) -> dict[str, Any]:
    low_s, _, high_s = statistics.quantiles(times_s, n=4, method="inclusive")
    return {"steps": len(times_s), "median_s": statistics.median(times_s), "quartiles_s": [low_s, high_s]}
