"""headroom(): measures how much faster a training could be without communication, which no hook can exceed.

`alternate.py` describes how steps with and without communication are timed in one training, without changing it.
"""

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import RegisterError, SpecError
from gradwire.tools.launch.launch import Report, follow
from gradwire.tools.launch.link import EmulatedLink, Link
from gradwire.tools.launch.plan import RunPlan, new_plan
from gradwire.tools.launch.script import Script
from gradwire.tools.launch.supervise import RunFailed
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
from gradwire.tools.measure.alternate_sharded import KINDS, AlternatingSharded, ShardedClock, Timeline, kind_of
from gradwire.tools.records.recommend import NETWORK_BOUND
from gradwire.tools.records.records import quartiles

STEPS = 80
MIN_ROUNDS, SURE_ROUNDS, FEW = 2, 4, 6
EXTRA_STEPS = 2
"""The built-in script trains this many more steps than are timed, because a step ends when the next one begins."""
ONE_RANK = "there is no communication to measure; take --nproc 2 or more"

_clocks: dict[str, Clock] = {}
"""The clock of this process, by the folder of its plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """Step times of the slowest rank, from complete rounds of ORDER."""

    with_s: tuple[float, ...]
    """Steps with communication."""
    without_s: tuple[float, ...]
    """Steps without."""
    ranks: int
    link: str | None
    """The emulated link; None for the real one."""
    wanted_steps: int
    """The number of steps to time, of both kinds together."""
    backward: Backward = UNSEEN
    """The median backward pass without communication, on rank 0."""
    without_gathers_s: tuple[float, ...] = ()
    """For models with `fully_shard`: steps whose parameters are gathered in no time."""
    without_reductions_s: tuple[float, ...] = ()
    """The same for the reductions of gradients."""
    without_replicas_s: tuple[float, ...] = ()
    """For models with replicas (HSDP): steps whose gradients are averaged across replicas in no time. Then there are
    none without reductions."""
    timeline: Timeline | None = None
    """For models with `fully_shard`: the median step without communication, on rank 0."""

    @property
    def is_sharded(self) -> bool:
        """Whether it is a model with `fully_shard`, whose gathers and reductions are timed separately."""
        return bool(self.without_gathers_s)

    @property
    def is_replicated(self) -> bool:
        """Whether it is a model with replicas (HSDP), whose averages across replicas are timed separately too."""
        return bool(self.without_replicas_s)

    def parts_s(self) -> dict[str, float]:
        """For models with `fully_shard`: how many seconds each direction adds to a step."""
        timed = {"reductions": self.without_reductions_s, "gathers": self.without_gathers_s}
        timed["replicas"] = self.without_replicas_s
        found = {name: self.exposed_part_s(times_s) for name, times_s in timed.items() if times_s}
        if self.is_replicated:  # all collectives block, so reductions take what is left
            found = {"reductions": max(self.exposed_part_s(self.without_s) - sum(found.values()), 0.0), **found}
        return found

    def exposed_part_s(self, without_s: Sequence[float]) -> float:
        """How many seconds longer a step is than one that is timed without a part of its communication."""
        return statistics.median(all_s - part_s for all_s, part_s in zip(self.with_s, without_s, strict=True))

    @property
    def exposed_s(self) -> float:
        """How many seconds longer communication makes a step: the median over the rounds."""
        return statistics.median(with_s - without_s for with_s, without_s in self.rounds())

    @property
    def exposed(self) -> float:
        """The same as a part of a step with communication."""
        return statistics.median(self._parts())

    @property
    def exposed_between(self) -> tuple[float, float]:
        """A 95% interval of `exposed`; for fewer than `FEW` rounds the range of all values, which is less certain."""
        return median_interval(self._parts())

    @property
    def ceiling(self) -> float:
        """How many times as fast the training would be with a hook that takes no time at all."""
        return 1 / (1 - max(self.exposed, 0.0))

    @property
    def is_network_bound(self) -> bool:
        """Whether a hook can pay."""
        return self.exposed >= NETWORK_BOUND

    @property
    def is_certain(self) -> bool:
        """Whether there are enough rounds, and the interval lies on one side of NETWORK_BOUND."""
        low, high = self.exposed_between
        return len(self.rounds()) >= SURE_ROUNDS and (low >= NETWORK_BOUND) == (high >= NETWORK_BOUND)

    def verdict(self) -> str:
        """The result in one or two sentences."""
        if self.is_network_bound:
            text = (
                f"Network-bound: communication takes {self.exposed:.0%} of a step, and a hook can make this training "
                f"up to {self.ceiling:.2f}x as fast."
            )
        else:
            text = (
                f"Not network-bound: communication takes {max(self.exposed, 0):.0%} of a step, less than "
                f"{NETWORK_BOUND:.0%}, so no hook can make this training more than {self.ceiling:.2f}x as "
                "fast. Do not use one."
            )
        if self.is_certain:
            return text
        why = "vary too much" if len(self.rounds()) >= SURE_ROUNDS else "are too few"
        return f"{text} The steps {why} to be certain: measure more of them with --steps {2 * self.wanted_steps}."

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
            **(self._parts_dict() if self.is_sharded else {}),
        }

    def _parts_dict(self) -> dict[str, Any]:
        parts = {"gathers": self.without_gathers_s, "reductions": self.without_reductions_s}
        parts["replicas"] = self.without_replicas_s
        steps = {f"without_{name}": _summary(times_s) for name, times_s in parts.items() if times_s}
        return {**steps, **{f"{name}_s": part_s for name, part_s in self.parts_s().items()}}

    def _parts(self) -> list[float]:
        return [1 - without_s / with_s for with_s, without_s in self.rounds()]

    def rounds(self) -> list[tuple[float, float]]:
        """For each round the mean of the steps with communication, and of those without.

        If there are enough, two rounds are taken together, one of which has the opposite order (`communicates`).
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
    report: Report = lambda part, doing: None,
    tell: Callable[[Headroom], None] | None = None,
) -> Headroom | None:
    """Time steps of a script with and without communication, without changing its training.

    Args:
        script: What to run; by default the built-in GPT on 2 ranks.
        steps: The number of steps to time, of both kinds together.
        link: A link to emulate, such as `1gbit,latency=1ms`.
        nproc: The number of ranks to start; see `launch.launch`.
        torchrun: Options of torchrun; see `launch.launch`.
        stop: End the script as soon as the steps are timed.
        report: Called with the part that is done and what is being done.
        tell: Called with the result as soon as there is one, even if the script fails afterwards. If a launcher has
            started this process, it is called when the script has ended.

    Returns:
        The result; None on all ranks but the first if a launcher has started this process.

    Raises:
        SpecError: There is nothing to measure, as on one rank. Nothing has been started.
        RunFailed: The script failed, or trained too few steps.

    Examples:
        >>> result = gradwire.advisor.headroom(steps=16, link="100mbit")  # the built-in GPT
    """
    _check(steps, nproc, torchrun)
    job = {"steps": steps, "link": None if link is None else str(Link.parse(link))}
    if script is None:
        script, nproc = built_in(WARM_UP + steps + len(ORDER) + EXTRA_STEPS, nproc)
    with new_plan("headroom", "gradwire.tools.measure.headroom:timed", job) as plan:
        watch = _Watch(plan, report, tell)
        try:
            follow(plan, script, nproc, torchrun, enough=lambda: watch.is_done() and stop)
        except RunFailed:  # perhaps after the last timed step: then there is a result nevertheless
            watch.is_done()
            raise
        return _result(plan)


class _Watch:
    """Watches a run: reports its progress, and tells its result once, as soon as there is one."""

    def __init__(self, plan: RunPlan, report: Report, tell: Callable[[Headroom], None] | None) -> None:
        self._plan, self._report, self._tell = plan, report, tell

    def is_done(self) -> bool:
        """Whether all steps are timed."""
        notes, steps = self._plan.read("times"), self._plan.job["steps"]
        done = len((_first(notes) or max(notes, key=_steps, default={"times": []}))["times"])
        self._report(min(done / steps, 1.0), f"step {done} of {steps}" if done else "warming up")
        if self._tell is not None and done >= steps:
            tell, self._tell = self._tell, None
            if (result := _result(self._plan)) is not None:
                tell(result)
        return bool(done >= steps)


def built_in(steps: int, nproc: int | None) -> tuple[Script, int | None]:
    """The built-in GPT as a script, and its number of ranks: 2, unless a launcher has made this process a rank."""
    script = Script("gradwire.tools.measure.builtin", (str(steps),), module=True)
    return script, 2 if nproc is None and "RANK" not in os.environ else nproc


def _check(steps: int, nproc: int | None, torchrun: Sequence[str]) -> None:
    """SpecError if there is nothing to measure. A range of nodes may be one: the model's group decides later."""
    if steps < MIN_ROUNDS * len(ORDER):
        raise SpecError(f"steps must be at least {MIN_ROUNDS * len(ORDER)}, got {steps}")
    has_nodes = any(option.startswith("--nnodes") for option in torchrun) and "--nnodes=1" not in torchrun
    if nproc == 1 and not has_nodes:
        raise SpecError(f"nproc is 1: {ONE_RANK}")


def timed(model: nn.Module, plan: RunPlan) -> None:
    """Time a model of the script, and write a note after every round."""
    if not isinstance(model, DistributedDataParallel):
        _timed_sharded(model, plan)
        return
    group, note = model.process_group, plan.new_note("times")
    if group.size() == 1 and plan.folder not in _clocks:  # fail now, not after all steps
        raise RegisterError(f"the model's process group has one rank: {ONE_RANK}")

    def publish(times: list[float], backward: Backward) -> None:
        plan.write(note, {"rank": group.rank(), "ranks": group.size(), "times": times, **backward._asdict()})

    if plan.folder not in _clocks:
        _clocks[plan.folder] = Clock(plan.job["steps"], publish)
        publish([], UNSEEN)
    model.register_comm_hook(Alternating(model, _clocks[plan.folder], plan.job["link"]), alternating_hook)


def _timed_sharded(model: nn.Module, plan: RunPlan) -> None:
    """The same for a model with `fully_shard`."""
    note, link = plan.new_note("times"), plan.job["link"]

    def publish(times: list[float], timeline: Timeline | None) -> None:
        content = {"rank": model_ranks.rank, "ranks": model_ranks.ranks, "times": times, "timeline": timeline}
        plan.write(note, {**content, "sharded": True, "replicated": model_ranks.across is not None})

    clock = _clocks.setdefault(plan.folder, ShardedClock(plan.job["steps"], publish))
    if not isinstance(clock, ShardedClock):
        raise RegisterError("the script trains both a DDP model and a model with fully_shard; headroom times one kind")
    emulated = None if link is None else EmulatedLink(Link.parse(link))
    model_ranks = AlternatingSharded(model, clock, emulated)
    if model_ranks.ranks == 1:
        raise RegisterError(f"the model is sharded over one rank: {ONE_RANK}")
    publish([], None)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95% interval of the median that `values` are a sample of; the range of all values if they are few."""
    ordered, count = sorted(values), len(values)
    skip = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[skip], ordered[count - 1 - skip]


def _first(notes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The note of rank 0 with the most steps."""
    return max((note for note in notes if note["rank"] == 0), key=_steps, default=None)


def _steps(note: dict[str, Any]) -> int:
    return len(note["times"])


def _result(plan: RunPlan) -> Headroom | None:
    notes = plan.read("times")
    if not notes:
        raise RunFailed(
            "the script ended, but it never built a torch.nn.parallel.DistributedDataParallel, and trained no model "
            "with fully_shard"
        )
    first = _first(notes)
    if first is None:  # rank 0 runs elsewhere, and has the result there
        return None
    times, ranks = first["times"], first["ranks"]
    if len(times) < MIN_ROUNDS * len(ORDER):
        need = WARM_UP + MIN_ROUNDS * len(ORDER) + 1
        raise RunFailed(f"the script trained too few steps for a result: let it train at least {need}")
    setting = {"ranks": ranks, "link": plan.job["link"], "wanted_steps": plan.job["steps"]}
    if "sharded" in first:
        return _sharded_result(times, first, setting)
    kinds = [communicates(at) for at in range(len(times))]
    return Headroom(
        with_s=tuple(time_s for time_s, kind in zip(times, kinds, strict=True) if kind),
        without_s=tuple(time_s for time_s, kind in zip(times, kinds, strict=True) if not kind),
        backward=Backward(first["backward_s"], first["came_s"], first["crowd"]),
        **setting,
    )


def _sharded_result(times: Sequence[float], note: dict[str, Any], setting: dict[str, Any]) -> Headroom:
    kinds: list[list[float]] = [[] for _ in KINDS]
    for at, time_s in enumerate(times):
        kinds[kind_of(at)].append(time_s)
    second = "without_replicas_s" if note["replicated"] else "without_reductions_s"
    names = ("with_s", second, "without_gathers_s", "without_s")
    by_name: dict[str, Any] = {name: tuple(kind) for name, kind in zip(names, kinds, strict=True)}
    return Headroom(timeline=Timeline.from_json(note["timeline"]), **by_name, **setting)


def _summary(times_s: Sequence[float]) -> dict[str, Any]:
    return {
        "steps": len(times_s),
        "median_s": statistics.median(times_s),
        "quartiles_s": list(quartiles(times_s)),
    }
