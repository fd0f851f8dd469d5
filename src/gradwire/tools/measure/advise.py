"""advise(): is this training limited by the network, which hook is best for it, and which line of code to add.

1. `headroom` times steps with and without communication.
2. `Survey` measures every hook on the same script: its error, and its predicted and measured step time.
3. `recommend` picks a hook, or none.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.auto.settings import Auto
from gradwire.auto.sharded import HOOKS, pair_name, split_pair
from gradwire.errors import SpecError
from gradwire.exchanges import EXCHANGES, Exact, exchange
from gradwire.models.buckets import MIB
from gradwire.models.ddp import attach
from gradwire.models.fsdp import attach_sharded
from gradwire.models.sharded_checks import gathers_of
from gradwire.spec import NestedSpec
from gradwire.tools.launch.launch import Report, follow
from gradwire.tools.launch.link import Link, emulate
from gradwire.tools.launch.plan import RunPlan, new_plan
from gradwire.tools.launch.script import Script
from gradwire.tools.launch.supervise import RunFailed
from gradwire.tools.measure.headroom import STEPS, Headroom, built_in, headroom
from gradwire.tools.measure.survey import ALWAYS, MOST_STEPS, TYPICAL_STEPS, Survey
from gradwire.tools.measure.survey_replicas import REPLICAS, ReplicaSurvey, attach_to_native, has_replicas
from gradwire.tools.measure.survey_sharded import GATHERS, ShardedSurvey, changes_weights, layouts_of
from gradwire.tools.measure.uncertainty import MODEL_ERROR
from gradwire.tools.records.recommend import BASELINE, PAYS, Option, Recommendation, recommend
from gradwire.tools.records.records import Split, median_uncertainty, quartiles

_taken: set[str] = set()
"""Folders of the plans whose first model this process has surveyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One hook."""

    hook: str
    predicted_s: float
    measured_s: float | None
    """None: its prediction was not among the best, or its error is too large."""
    error: float
    """Error of the mean, relative to the mean, on the model's own gradients."""
    sent_bytes: float
    """Per rank and step."""
    uncertainty: float = MODEL_ERROR
    """How far `predicted_s` may be off, as a part of it."""
    step_s: tuple[float, ...] = ()
    """The times that `measured_s` is the median of: of every step, the time of the slowest rank."""
    split: Split | None = None
    """The parts of a step on rank 0, if it was measured."""
    gather_bytes: float | None = None
    """For models with `fully_shard`: the part of `sent_bytes` that parameters take."""

    @property
    def quartiles_s(self) -> tuple[float, float] | None:
        """Lower and upper quartile of `step_s`, if it was measured."""
        return quartiles(self.step_s) if len(self.step_s) > 1 else None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """The inverse of `dataclasses.asdict`."""
        split = None if values["split"] is None else Split(**values["split"])
        return cls(**{**values, "step_s": tuple(values["step_s"]), "split": split})


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do, and why."""

    headroom: Headroom
    rows: tuple[Row, ...]
    max_error: float
    """The largest error of the mean that a recommended hook may have."""
    params: int
    """Parameters of the model."""
    bucket_mb: float | None = None
    """The size of gradwire's buckets, if they replace DDP's."""
    any_gather: bool = False
    """Whether gathers of fewer than 16 bits may be recommended, because the user has named them."""

    @property
    def recommendation(self) -> Recommendation:
        """By the rule of `recommend`, from the hooks that were measured."""
        measured = [row for row in self.rows if row.measured_s is not None or row.hook == BASELINE]
        made = recommend([self._option(row) for row in measured], ceiling=self.headroom.ceiling)
        if self.headroom.is_replicated:
            return replace(made, reason=made.reason + _REPLICAS_TEXT, model="model", replicas=True)
        if self.headroom.is_sharded:
            return replace(made, reason=made.reason + _weights_text(made.hook), model="model")
        return replace(made, reason=made.reason + self._buckets_text())

    @property
    def pick(self) -> str:
        """The hook to use; `exact` for none."""
        return self.recommendation.hook or BASELINE

    @property
    def compress(self) -> bool:
        """Whether a hook pays."""
        return self.recommendation.hook is not None

    @property
    def line(self) -> str:
        """What to paste into the script."""
        return self.recommendation.code or f"# no hook: {'FSDP2' if self.headroom.is_sharded else 'DDP'} as it is"

    def reason(self) -> str:
        """The recommendation in whole sentences."""
        return str(self.recommendation)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        answer = {"pick": self.pick, "compress": self.compress, "reason": self.reason(), "line": self.line}
        limits = {"max_error": self.max_error, "params": self.params, "bucket_mb": self.bucket_mb}
        rows = [asdict(row) for row in self.rows]
        return {**answer, **limits, "headroom": self.headroom.as_dict(), "hooks": rows}

    def promising(self, most: int = 3) -> list[Row]:
        """The hooks that are excluded but worth a comparison, the most exact ones first.

        Their error is above `max_error`, or they change the weights that the model computes with. Each is predicted to
        be at least PAYS times as fast as all hooks with a smaller error, the pick included. Taking the fastest instead
        would compare the coarsest ones, and miss a hook between them and the pick that does no harm. Whether they harm
        the training only a comparison can tell, and that takes no replicas.
        """
        if not self.headroom.is_network_bound or self.headroom.is_replicated:
            return []
        best_s = min(row.predicted_s for row in self.rows if not self._option(row).excluded or row.hook == self.pick)
        found = []
        for row in sorted(self.rows, key=lambda row: row.error):
            if self._option(row).excluded and PAYS * row.predicted_s <= best_s:
                found.append(row)
                best_s = row.predicted_s
        return found[:most]

    def _option(self, row: Row) -> Option:
        excluded = f"error above {self.max_error:g}" if row.error > self.max_error else self._gather_text(row)
        if row.measured_s is None:
            return Option(hook=row.hook, step_s=row.predicted_s, error=row.error, excluded=excluded)
        return Option(
            hook=row.hook,
            step_s=row.measured_s,
            error=row.error,
            quartiles_s=row.quartiles_s,
            uncertainty=median_uncertainty(row.step_s) if row.step_s else 0.0,
            excluded=excluded,
        )

    def _gather_text(self, row: Row) -> str:
        """Why a hook of a model with `fully_shard` must not be recommended."""
        pairs = self.headroom.is_sharded and not self.headroom.is_replicated
        wrong = pairs and not self.any_gather and changes_weights(row.hook)
        return (
            "it changes the weights that the model computes with: compare the loss before you use it" if wrong else ""
        )

    def _buckets_text(self) -> str:
        """What the smaller buckets alone gain: every hook, `exact` too, is measured with them."""
        exact = next(row for row in self.rows if row.hook == BASELINE)
        plain_s, exact_s = statistics.median(self.headroom.with_s), exact.measured_s or exact.predicted_s
        if self.bucket_mb is None or plain_s < PAYS * exact_s:
            return ""
        ours = f"gradwire's buckets of {self.bucket_mb:.1f} MiB"
        return f" Plain DDP takes {1e3 * plain_s:.1f} ms, because its buckets are larger than {ours}."


def advise(
    script: Script | None = None,
    *,
    hooks: Sequence[str] = (),
    max_error: float = 0.02,
    steps: int = STEPS,
    link: str | None = None,
    nproc: int | None = None,
    torchrun: Sequence[str] = (),
    report: Report = lambda part, doing: None,
) -> Advice | None:
    """Run a script twice until enough is known, and recommend a hook, or none.

    In the first run the training is not changed. In the second one it uses the hooks, so its results are of no use.

    Args:
        script: What to run; by default the built-in GPT on 2 ranks.
        hooks: The specs to choose from; by default all registered hooks. For models with `fully_shard` also pairs of
            a spec and a gather, such as `int8/bf16`. For models with replicas (HSDP): how these are averaged.
        max_error: The largest error of the mean, relative to the mean, that a recommended hook may have.
        steps: The number of steps to time for the headroom.
        link: A link to emulate, such as `1gbit,latency=1ms`.
        nproc: The number of ranks to start; see `launch.launch`.
        torchrun: Options of torchrun; see `launch.launch`.
        report: Called with the part that is done and what is being done.

    Returns:
        The advice; None on all ranks but the first if a launcher has started this process.

    Raises:
        SpecError: Something cannot be measured. Nothing has been started.
        RunFailed: The script failed, or trained too few steps.

    Examples:
        >>> advice = gradwire.advisor.advise(link="100mbit")  # the built-in GPT
        >>> advice.pick, advice.line
    """
    checked = [pair_name(*split_pair(hook)) if "/" in hook else str(exchange(hook)) for hook in hooks]
    Auto(hooks=tuple(NestedSpec(hook.partition("/")[0]) for hook in checked), max_error=max_error)
    ranks: dict[str, Any] = {"nproc": nproc, "torchrun": torchrun}
    first = lambda part, doing: report(part / 2, f"headroom: {doing}")  # noqa: E731 - the same bar for both runs
    measured = headroom(script, steps=steps, link=link, stop=True, report=first, **ranks)
    if dist.is_initialized():  # inside a launcher: the script makes its group anew when it runs again
        dist.destroy_process_group()
    surveyed = _survey(script, {"hooks": checked, "max_error": max_error}, measured, link, ranks, report)
    if measured is None or surveyed is None:
        return None
    rows = tuple(map(Row.from_dict, surveyed["rows"]))
    model = {"params": surveyed["params"], "bucket_mb": surveyed["bucket_mb"], "any_gather": bool(hooks)}
    return Advice(headroom=measured, rows=rows, max_error=max_error, **model)


def _settings(hooks: Sequence[str], max_error: float) -> Auto:
    if paired := [hook for hook in hooks if "/" in hook]:
        raise SpecError(f"a DDP model gathers no parameters: write {paired[0].partition('/')[0]}, not {paired[0]}")
    named = list(hooks) or [name for name in EXCHANGES if name != "noop"]
    candidates = tuple(map(NestedSpec, dict.fromkeys([*ALWAYS, *named])))
    return Auto(hooks=candidates, max_error=max_error, recheck=1 << 60)


def _survey(
    script: Script | None,
    asked: dict[str, Any],
    measured: Headroom | None,
    link: str | None,
    ranks: dict[str, Any],
    report: Report,
) -> dict[str, Any] | None:
    """The second run."""
    if script is None:
        script, ranks["nproc"] = built_in(MOST_STEPS, ranks["nproc"])
    job = {
        **asked,
        "link": None if link is None else str(Link.parse(link)),
        "compute": None if measured is None else _compute_of(measured),
    }
    with new_plan("advise", "gradwire.tools.measure.advise:survey_first", job) as plan:

        def enough() -> bool:
            done = max((note["steps"] for note in plan.read("progress")), default=0)
            doing = f"step {done} of about {TYPICAL_STEPS}" if done else "predicting step times"
            report(0.5 + min(done / TYPICAL_STEPS, 1.0) / 2, doing)
            return bool(plan.read("survey"))

        follow(plan, script, ranks["nproc"], ranks["torchrun"], enough=enough)
        notes = plan.read("survey")
        if not notes and measured is not None:
            raise RunFailed(f"the script trained too few steps to try the hooks: let it train at least {MOST_STEPS}")
        return notes[0] if notes else None


def _compute_of(measured: Headroom) -> dict[str, Any]:
    step_s = statistics.median(measured.without_s)
    backward_s = min(measured.backward.backward_s or step_s * 2 / 3, step_s)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", measured.ranks))
    cores = (os.cpu_count() or 1) / here
    return {
        "forward_s": step_s - backward_s,
        "came_s": dict(measured.backward.came_s),
        "backward_s": backward_s,
        "spread": median_uncertainty(measured.without_s),
        "cores": max(cores, 1.0),
        "crowd": max(1 / cores, 1.0) if measured.is_sharded else measured.backward.crowd,
        "timeline": measured.timeline,
        "threads": min(torch.get_num_threads(), max(1, round(cores))),
    }


def survey_first(model: nn.Module, plan: RunPlan) -> None:
    """Survey the first model of the script, and write a note."""
    if plan.folder in _taken:
        return
    _taken.add(plan.folder)
    link, progress = plan.job["link"], plan.new_note("progress")
    if not isinstance(model, DistributedDataParallel):
        _survey_sharded(model, plan)
        return
    settings = _settings(plan.job["hooks"], plan.job["max_error"])
    cap_bytes = model.bucket_bytes_cap
    with emulate(link) if link else nullcontext():
        hook = attach(model, Exact())
    bucket_mb = None if model.bucket_bytes_cap == cap_bytes else model.bucket_bytes_cap / MIB

    def publish(result: dict[str, Any]) -> None:
        if hook.rank == 0:
            plan.write(plan.new_note("survey"), {**result, "bucket_mb": bucket_mb})

    def count(steps: int) -> None:
        plan.write(progress, {"steps": steps})

    hook.pilot = Survey(hook, settings, compute=plan.job["compute"], link=link, publish=publish, count=count)


def _survey_sharded(model: nn.Module, plan: RunPlan) -> None:
    """The same for a model with `fully_shard`."""
    link, progress, job = plan.job["link"], plan.new_note("progress"), plan.job
    units, replicated = layouts_of(model), has_replicas(model)
    names = [] if replicated else _pair_names(model, job["hooks"])
    settings = _replica_settings(job["hooks"], job["max_error"]) if replicated else Auto(max_error=job["max_error"])
    with emulate(link) if link else nullcontext():
        hook = attach_to_native(model) if replicated else attach_sharded(model, Exact(), Exact())

    def publish(result: dict[str, Any]) -> None:
        if hook.rank == 0 and (hook.replicas is None or hook.replicas.rank == 0):
            params = sum(shard.whole.numel() for unit in units for shard in unit.shards)
            plan.write(plan.new_note("survey"), {**result, "params": params, "bucket_mb": None})

    def count(steps: int) -> None:
        plan.write(progress, {"steps": steps})

    settings = replace(settings, recheck=1 << 60)
    how: dict[str, Any] = {"compute": job["compute"], "link": link, "publish": publish, "count": count, "units": units}
    survey = ReplicaSurvey(hook, settings, **how) if replicated else ShardedSurvey(hook, settings, names=names, **how)
    hook.pilot = survey


def _pair_names(model: nn.Module, hooks: Sequence[str]) -> list[str]:
    """The pairs to try on a model with `fully_shard`."""
    named = hooks or [pair_name(spec, gather) for spec in HOOKS for gather in gathers_of(model, GATHERS)]
    return list(dict.fromkeys([BASELINE, *(pair_name(*split_pair(name)) for name in named)]))


def _replica_settings(hooks: Sequence[str], max_error: float) -> Auto:
    """The specs to try across the replicas of a model."""
    if paired := [hook for hook in hooks if "/" in hook]:
        raise SpecError(
            f"for a model with replicas (HSDP) a hook is how these are averaged: write {paired[0].partition('/')[0]}, "
            f"not {paired[0]}"
        )
    return Auto(hooks=tuple(map(NestedSpec, dict.fromkeys([*ALWAYS, *(hooks or REPLICAS)]))), max_error=max_error)


_REPLICAS_TEXT = " Inside a replica gradients are reduced and parameters gathered exactly, as FSDP2 does it."


def _weights_text(hook: str | None) -> str:
    """What the gather of a recommended pair does to the model's parameters."""
    gather = "exact" if hook is None else split_pair(hook)[1]
    if gather == "exact":
        return ""
    if hook is not None and changes_weights(hook):
        return f" The model computes with parameters of {gather}, which changes the training: compare the loss first."
    return f" The model computes with parameters rounded to {gather}; the optimizer keeps the exact ones."
