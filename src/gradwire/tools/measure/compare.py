"""compare(): does a hook harm this training? Runs of an unmodified script under each hook, with the same seeds.

1. Each run is a fresh start of the script. `launch/startup` seeds it, and `losses.py` records its losses.
2. The first loss of a seed must be the same under every hook, because nothing has been averaged yet; and a second run
   of the reference must have the same first losses. Otherwise runs with the same seed are not the same training.
3. Every run goes into a file as soon as it is over, and a run that the file holds is not repeated.
4. `records.verdicts` turns the runs into gaps and sentences.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gradwire.auto.settings import auto
from gradwire.auto.sharded import pair_name, split_pair
from gradwire.errors import SpecError
from gradwire.exchanges import exchange
from gradwire.tools.launch.forked import ForkServer
from gradwire.tools.launch.launch import Report, fork_server, is_rank, launch
from gradwire.tools.launch.link import Link
from gradwire.tools.launch.plan import RunPlan, new_plan
from gradwire.tools.launch.script import Script
from gradwire.tools.launch.supervise import RunFailed
from gradwire.tools.measure.losses import RunCurves
from gradwire.tools.records.curves import Conditions, Curve, append_curves, check_conditions, read_curves, source_of
from gradwire.tools.records.records import PLAIN, quartiles

PRELOAD = ("gradwire.testing.preload", "gradwire.tools.measure.losses")
"""What every run needs, so that it is imported once."""
CHECK_STEPS = 10
"""The steps of the second run of the reference."""
SAME = 1e-5
"""Losses that differ by less, relative to their size, count as the same."""
GIVE_UP = 20
"""A run ends after so many losses in a row that are not finite."""
NO_LOSS = (
    "the script trained no step that could be recorded: compare needs a scalar loss on which backward() is called, "
    "in a model with DistributedDataParallel or fully_shard, or followed by the step of an optimizer"
)
FIX_SEED = (
    "So runs with the same seed are not the same training, and cannot be compared in pairs. Let the script take all "
    "random numbers from the generators of random, numpy and torch, or give it a seed with --seed-arg, or read the "
    "environment variable GRADWIRE_SEED"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One of the things to compare."""

    name: str
    hook: str
    """A spec, or PLAIN: gradwire registers nothing."""
    args: tuple[str, ...] = ()
    """More arguments of the script."""
    gather: str | None = None
    """For models with `fully_shard`: how parameters are gathered, if the hook is one of a pair such as int8/bf16."""

    @classmethod
    def of_hook(cls, spec: str) -> Entry:
        """A hook, or a pair of a hook and a gather. SpecError if there is no such hook."""
        if "/" in spec:
            hook, gather = split_pair(spec)
            return cls(pair_name(hook, gather), hook, gather=gather)
        hook = PLAIN if spec == PLAIN else str(auto(spec) or exchange(spec))
        return cls(hook, hook)

    @classmethod
    def of_variant(cls, text: str) -> Entry:
        """`NAME=ARGS` or `NAME=@HOOK ARGS`. SpecError if it is neither."""
        name, equals, rest = text.partition("=")
        words = shlex.split(rest)
        if not equals or not name.strip() or "@" in name or words[:1] == ["@"]:
            raise SpecError(
                f"variant {text!r} must be 'NAME=ARGS' or 'NAME=@HOOK ARGS', such as 'lion=--optimizer lion' or "
                "'lion-int4=@int4 --optimizer lion'"
            )
        if words and words[0].startswith("@"):
            return replace(cls.of_hook(words[0][1:]), name=name.strip(), args=tuple(words[1:]))
        return cls(name.strip(), PLAIN, tuple(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    script: Script
    entries: tuple[Entry, ...]
    """The first one is the reference."""
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int | None = None
    """None: to the end of the script."""
    link: str | None = None
    gather: str | None = None
    metric: str | None = None
    seed_arg: str | None = None
    nproc: int | None = None
    torchrun: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if len(names) < 2:
            raise SpecError("there is nothing to compare: give at least two hooks or variants, the reference first")
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise SpecError(f"{', '.join(double)} is given twice; every hook and variant needs a name of its own")
        if self.steps is not None and self.steps < CHECK_STEPS:
            raise SpecError(f"steps must be at least {CHECK_STEPS}, got {self.steps}")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise SpecError(f"seeds must be different numbers from 0 on, got {list(self.seeds)}")
        if self.link is not None and any(entry == Entry(PLAIN, PLAIN) for entry in self.entries):
            raise SpecError("--link slows down hooks only, and plain has none; take exact, which sends the same bytes")
        if self.gather is not None and (paired := [entry.name for entry in self.entries if entry.gather is not None]):
            raise SpecError(f"{paired[0]} says how parameters are gathered, and so does --gather: leave out --gather")
        if is_rank(self.nproc, self.torchrun):
            raise SpecError("compare starts the script many times, so a launcher must not start it; use --nproc N")
        if any(option.startswith("--nnodes") and option != "--nnodes=1" for option in self.torchrun):
            raise SpecError("compare runs on one machine: leave out --nnodes")

    @property
    def reference(self) -> Entry:
        """What all others are compared with."""
        return self.entries[0]

    @property
    def conditions(self) -> Conditions:
        """What the runs in a file must have in common with these."""
        return Conditions(
            script=tuple(self.script.words()),
            source="" if self.script.module else source_of(Path(self.script.name)),
            nproc=self.nproc,
            steps=self.steps,
            link=None if self.link is None else str(Link.parse(self.link)),
            gather=None if self.gather is None else str(exchange(self.gather)),
            metric=self.metric,
            seed_arg=self.seed_arg,
            torch=torch.__version__,
        )


def compare(plan: Plan, path: Path, *, report: Report = lambda part, doing: None) -> list[Curve]:
    """Run what a file does not hold yet, and return all runs of the plan.

    Args:
        plan: What to run.
        path: The file of runs. It is made, or continued.
        report: Called with the part that is done and what is being done.

    Returns:
        The runs, those that failed too.

    Raises:
        SpecError: The file has runs under other conditions. Nothing has been started.
        RunFailed: The reference failed, or the runs of a seed are not the same training. The file has all runs so far.
    """
    conditions = plan.conditions
    held = read_curves(path)
    check_conditions(held, conditions, path)
    curves = {curve.key: curve for curve in held if not curve.failed}
    wanted = [(entry, seed) for seed in plan.seeds for entry in plan.entries]
    missing = sum((entry.name, seed) not in curves for entry, seed in wanted)
    with fork_server(None if plan.torchrun or not missing else plan.nproc, PRELOAD) as server:
        todo = _Todo(plan, conditions, path, curves, report, missing, server)
        for entry, seed in wanted:
            todo.run(entry, seed)
    return [curves[entry.name, seed] for entry, seed in wanted if (entry.name, seed) in curves]


class _Todo:
    """Runs one after the other, and checks that they belong together."""

    def __init__(
        self,
        plan: Plan,
        conditions: Conditions,
        path: Path,
        curves: dict[tuple[str, int], Curve],
        report: Report,
        total: int,
        server: ForkServer | None,
    ) -> None:
        self._plan, self._conditions, self._path, self._curves = plan, conditions, path, curves
        self._report, self._total, self._done, self._server = report, total, 0, server

    def run(self, entry: Entry, seed: int) -> None:
        """Run one entry with one seed, unless the file holds it, or the entry has failed already."""
        key, reference = (entry.name, seed), self._plan.reference
        earlier = next((c for c in self._curves.values() if c.name == entry.name and c.failed), None)
        if key not in self._curves and earlier is None:
            curve = self._measure(entry, seed, self._plan.steps)
            self._curves[key] = curve
            append_curves(self._path, [curve])
            self._done += 1
            if entry == reference:
                self._check_reference(curve)
        elif entry == reference:
            _check_trained(self._curves[key])
        if key in self._curves and not self._curves[key].failed:
            self._check_pair(entry, self._curves[key], self._curves[reference.name, seed])

    def _measure(self, entry: Entry, seed: int, steps: int | None, doing: str = "") -> Curve:
        def show(part: float, text: str) -> None:
            whole = (self._done + part) / max(self._total, 1)
            self._report(min(whole, 1.0), f"{entry.name}, seed {seed}: {doing}{text}")

        return run_once(self._plan, self._conditions, entry, seed, steps, show, self._server)

    def _check_reference(self, curve: Curve) -> None:
        """The reference must train; its first run is repeated, and the seeds must make a difference."""
        _check_trained(curve)
        same = [c for c in self._curves.values() if c.name == curve.name and c.seed != curve.seed]
        if not same:
            again = self._measure(self._plan.reference, curve.seed, CHECK_STEPS, "again, ")
            check_same(curve, again)
        for other in same:
            check_seeds(curve, other)

    def _check_pair(self, entry: Entry, curve: Curve, reference: Curve) -> None:
        """The first losses of a seed must be the same, unless they are computed with gathered parameters."""
        if curve.ranks != reference.ranks:
            raise RunFailed(f"{curve.name} ran on {curve.ranks} ranks and {reference.name} on {reference.ranks}")
        gathers = {self._plan.gather, entry.gather, self._plan.reference.gather}
        if gathers <= {None, "exact"} and not curve.args and not _close(curve.first, reference.first):
            raise RunFailed(
                f"the first loss with seed {curve.seed} is {_texts(curve.first)} with {curve.name} and "
                f"{_texts(reference.first)} with {reference.name}, though nothing has been averaged by then: the data "
                f"order or the initial parameters differ. {FIX_SEED}"
            )


def _check_trained(curve: Curve) -> None:
    """RunFailed if a run of the reference is of no use."""
    if curve.failed:
        raise RunFailed(f"the reference {curve.name} failed with seed {curve.seed}: {curve.failed}")
    if curve.diverged_at is not None:
        raise RunFailed(
            f"the reference {curve.name} has no finite loss from step {curve.diverged_at} on with seed {curve.seed}, "
            "so there is nothing to compare with"
        )


def check_same(curve: Curve, again: Curve) -> None:
    """RunFailed if two runs of the same hook and seed differ."""
    if again.failed:
        raise RunFailed(f"the reference {curve.name} failed when it was run again: {again.failed}")
    pairs = list(zip(curve.losses, again.losses, strict=False))
    for step, (a, b) in enumerate(pairs, start=1):
        if not _close((a,), (b,)):
            raise RunFailed(
                f"two runs of {curve.name} with seed {curve.seed} differ at step {step}: the loss is {a:.6g} and "
                f"{b:.6g}. {FIX_SEED}"
            )


def check_seeds(curve: Curve, other: Curve) -> None:
    """RunFailed if two seeds give the same training."""
    if curve.losses == other.losses:
        raise RunFailed(
            f"seeds {other.seed} and {curve.seed} give the same losses, so the seeds have no effect. The script takes "
            "its random numbers from generators of its own: give it a seed with --seed-arg, or let it read the "
            "environment variable GRADWIRE_SEED"
        )


def _close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(math.isclose(a, b, rel_tol=SAME, abs_tol=1e-12) for a, b in zip(ours, theirs, strict=True))


def _texts(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)


# -- one run -----------------------------------------------------------------------------------------------------------


def run_once(
    plan: Plan,
    conditions: Conditions,
    entry: Entry,
    seed: int,
    steps: int | None,
    report: Report,
    server: ForkServer | None = None,
) -> Curve:
    """Start the script once. A run that fails gives a curve too, which says why."""
    job = {
        "hook": entry.hook,
        "steps": steps,
        "link": conditions.link,
        "gather": entry.gather or conditions.gather,
        "metric": conditions.metric,
    }
    target, start = "gradwire.tools.measure.losses:hooked", "gradwire.tools.measure.losses:start"
    with new_plan("compare", target, job, start) as inside:
        watch = _Watch(inside, steps, conditions.metric, report)
        failed = ""
        try:
            _start(plan, inside, entry, seed, watch, server)
        except RunFailed as error:
            failed = str(error) or f"the script ended with exit code {error.exit_code}"
        watch.curves.update()
        return _curve(watch, conditions, entry, seed, steps, failed)


def _start(plan: Plan, inside: RunPlan, entry: Entry, seed: int, watch: _Watch, server: ForkServer | None) -> None:
    args = (*plan.script.args, *entry.args, *_seed_words(plan.seed_arg, seed))
    env = {"GRADWIRE_SEED": str(seed), "PYTHONHASHSEED": "0"}
    launch(
        replace(plan.script, args=args),
        inside,
        nproc=plan.nproc,
        torchrun=plan.torchrun,
        enough=watch.is_done,
        env=env,
        quiet=True,
        server=server,
    )


def _seed_words(seed_arg: str | None, seed: int) -> list[str]:
    """`--seed` -> `--seed 3`, and `seed=` -> `seed=3`."""
    if seed_arg is None:
        return []
    return [f"{seed_arg}{seed}"] if seed_arg.endswith("=") else [seed_arg, str(seed)]


class _Watch:
    """Watches a run, and ends it when it has trained enough."""

    def __init__(self, inside: RunPlan, steps: int | None, metric: str | None, report: Report) -> None:
        self.curves = RunCurves(inside.folder)
        self._steps, self._metric, self._report = steps, metric, report

    def is_done(self) -> bool:
        """Whether all steps are recorded, or the losses are not finite any more."""
        self.curves.update()
        done = self.curves.steps
        if self._steps:
            self._report(min(done / self._steps, 1.0), f"step {done} of {self._steps}" if done else "starting")
        else:
            self._report(0.0, f"step {done}" if done else "starting")
        tail = self.curves.mean_losses()[-GIVE_UP:] if done >= GIVE_UP else []
        if tail and not any(map(math.isfinite, tail)):
            return True
        enough = self._steps is not None and done >= self._steps
        return enough and (self._metric is None or self._logged())

    def _logged(self) -> bool:
        values = self.curves.metric()
        return bool(values) and values[-1][0] >= (self._steps or 0)


def _curve(watch: _Watch, conditions: Conditions, entry: Entry, seed: int, steps: int | None, failed: str) -> Curve:
    curves = watch.curves
    losses, step_s = curves.mean_losses(), curves.step_s()
    ranks = curves.ranks
    curve = Curve(
        conditions=conditions,
        name=entry.name,
        hook=entry.hook,
        args=entry.args,
        seed=seed,
        ranks=len(ranks),
        losses=tuple(losses),
        first=tuple(each.losses[0] for each in ranks if each.losses),
        metric=tuple(curves.metric()),
        step_s=statistics.median(step_s) if step_s else math.nan,
        quartiles_s=quartiles(step_s) if step_s else (math.nan, math.nan),
        sent_bytes=next((each.sent_bytes for each in ranks if each.sent_bytes is not None), None),
    )
    return replace(curve, failed=failed or _why_failed(curve, steps, curves.problem()))


def _why_failed(curve: Curve, steps: int | None, problem: str) -> str:
    """What is wrong with a run that ended by itself; empty if nothing is."""
    if problem or not curve.losses:
        return problem or NO_LOSS
    if steps is not None and len(curve.losses) < steps and curve.diverged_at is None:
        done = len(curve.losses)
        return (
            f"the script trained {done} steps, fewer than the {steps} of --steps: take --steps {done}, or train longer"
        )
    if curve.conditions.metric is not None and not curve.metric and curve.diverged_at is None:
        name = curve.conditions.metric
        return f"the script logged no {name}: let it call gradwire.log({name!r}, value) on every rank"
    return ""
