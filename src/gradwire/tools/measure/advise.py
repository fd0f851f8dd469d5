"""advise(): is this run held back by the network, which hook is best for it, and the line of code to paste.

1. `headroom` times steps with and without communication: below 10%, the answer is not to compress.
2. A survey of every hook on the same script: error, predicted and measured step time (`survey.py`).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.auto.settings import Auto
from gradwire.auto.trial import NEAR
from gradwire.exchanges import EXCHANGES, Exact, exchange
from gradwire.models.buckets import MIB
from gradwire.models.ddp import attach
from gradwire.spec import NestedSpec
from gradwire.tools.launch import Plan, Script, ScriptFailed, follow
from gradwire.tools.launch.link import Link, emulate
from gradwire.tools.launch.plan import new_plan
from gradwire.tools.measure.headroom import STEPS, Headroom, headroom, local_ranks
from gradwire.tools.measure.survey import ALWAYS, MOST_STEPS, TYPICAL_STEPS, Survey
from gradwire.tools.records.records import Split

PAYS = 1.10
"""A hook that makes a run faster by less than this is not worth its risk."""
_taken: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One hook."""

    hook: str
    predicted_s: float
    measured_s: float | None
    """None: it did not look promising enough to be measured, or its error is too large."""
    error: float
    """Of the mean, relative to the mean, on the model's own gradients."""
    sent_bytes: float
    """By a rank, each step."""
    step_s: tuple[float, ...] = ()
    """What `measured_s` is the median of: the slowest rank's time of every step."""
    split: Split | None = None
    """Where the time goes on rank 0, if it was measured."""

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
    pick: str
    """The hook to use; `exact` for none."""
    max_error: float
    params: int
    """Parameters of the model."""
    bucket_mb: float | None = None
    """Of the buckets that gradwire cut, where they are not DDP's."""

    @property
    def compress(self) -> bool:
        """Whether a hook pays."""
        return self.pick != "exact"

    @property
    def line(self) -> str:
        """What to paste into the script."""
        return f'gradwire.register(ddp_model, "{self.pick}")' if self.compress else "# no hook: DDP as it is"

    def reason(self) -> str:
        """In a sentence or two."""
        exact, picked = self._measured("exact"), self._measured(self.pick)
        found = self.headroom
        if not self.compress and not found.is_network_bound:
            return (
                f"Do not compress: {found.exposed:.0%} of a step is exposed communication, and below 10% no hook pays."
            )
        if not self.compress:
            return (
                f"Do not compress: up to {found.ceiling:.2f}x is there to gain, but of the hooks with an error of at "
                f"most {self.max_error:g} none was at least {PAYS:.2f}x as fast as exact averaging.{self._of_buckets()}"
            )
        return (
            f"Use {self.pick}: a step takes {1e3 * picked:.1f} ms instead of {1e3 * exact:.1f}, {exact / picked:.2f}x "
            f"as fast, of at most {found.ceiling:.2f}x; the error of the mean is {self._row(self.pick).error:.2g}."
            f"{self._of_buckets()}"
        )

    def _of_buckets(self) -> str:
        """What other buckets alone do: every hook, `exact` too, is measured with those that gradwire cut."""
        plain, exact = statistics.median(self.headroom.with_s), self._measured("exact")
        if self.bucket_mb is None or plain < PAYS * exact:
            return ""
        ours = f"gradwire's {self.bucket_mb:.1f} MiB"
        return f" DDP as it is takes {1e3 * plain:.1f} ms, as its buckets are larger than {ours}."

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        rows = [asdict(row) for row in self.rows]
        told = {"pick": self.pick, "compress": self.compress, "reason": self.reason(), "line": self.line}
        limits = {"max_error": self.max_error, "params": self.params, "bucket_mb": self.bucket_mb}
        return {**told, **limits, "headroom": self.headroom.as_dict(), "hooks": rows}

    def _row(self, hook: str) -> Row:
        return next(row for row in self.rows if row.hook == hook)

    def _measured(self, hook: str) -> float:
        return self._row(hook).measured_s or self._row(hook).predicted_s


def advise(
    script: Script | None = None,
    *,
    hooks: Sequence[str] = (),
    max_error: float = 0.02,
    steps: int = STEPS,
    link: str | None = None,
    nproc: int | None = None,
    torchrun: Sequence[str] = (),
    report: Callable[[float, str], None] = lambda part, doing: None,
) -> Advice | None:
    """Run a script twice, by default the built-in GPT on 2 ranks, until enough is known, and say what to do.

    In the first run training is as ever; in the second it uses the hooks, so its results are not for keeping. Inside a
    launcher all ranks but the first return None.
    """
    settings = _settings(hooks, max_error)
    ranks: dict[str, Any] = {"nproc": nproc, "torchrun": torchrun}
    first = lambda part, doing: report(part / 2, f"headroom: {doing}")  # noqa: E731 - the same bar for both runs
    found = headroom(script, steps=steps, link=link, stop=True, report=first, **ranks)
    if dist.is_initialized():  # inside a launcher: the script makes its group anew when it runs again
        dist.destroy_process_group()
    told = _survey(script, settings, found, link, ranks, report)
    if found is None or told is None:
        return None
    rows = tuple(map(Row.from_dict, told["rows"]))
    pick = _pick(rows, found, max_error)
    model = {"params": told["params"], "bucket_mb": told["bucket_mb"]}
    return Advice(headroom=found, rows=rows, pick=pick, max_error=max_error, **model)


def _pick(rows: Sequence[Row], found: Headroom, max_error: float) -> str:
    """The most exact of the fastest, if it is worth it."""
    fit = {row.hook: row for row in rows if row.measured_s and (row.error <= max_error or row.hook == "exact")}
    if "exact" not in fit or not found.is_network_bound:  # alone within the error, `exact` needs no measuring
        return "exact"
    times = {hook: row.measured_s for hook, row in fit.items() if row.measured_s}
    return worth_most(times, {hook: row.error for hook, row in fit.items()})


def worth_most(times_s: Mapping[str, float], errors: Mapping[str, float]) -> str:
    """The most exact hook within 3% of the fastest; `exact` if none makes a step at least 1.10x as fast."""
    best = min(times_s.values())
    if times_s["exact"] / best < PAYS:
        return "exact"
    return min((hook for hook, time_s in times_s.items() if time_s <= NEAR * best), key=lambda hook: errors[hook])


def _settings(hooks: Sequence[str], max_error: float) -> Auto:
    named = [str(exchange(spec)) for spec in hooks] or [name for name in EXCHANGES if name != "noop"]
    candidates = tuple(map(NestedSpec, dict.fromkeys([*ALWAYS, *named])))
    return Auto(hooks=candidates, max_error=max_error, recheck=1 << 60)


def _survey(
    script: Script | None,
    settings: Auto,
    found: Headroom | None,
    link: str | None,
    ranks: dict[str, Any],
    report: Callable[[float, str], None],
) -> dict[str, Any] | None:
    """The second run."""
    if script is None:
        ranks = {**ranks, "nproc": local_ranks(ranks["nproc"])}
        script = Script("gradwire.tools.measure.builtin", (str(MOST_STEPS),), module=True)
    job = {
        "hooks": settings.hooks,
        "max_error": settings.max_error,
        "link": None if link is None else str(Link.parse(link)),
        "compute": None if found is None else _compute_of(found),
    }
    with new_plan("advise", "gradwire.tools.measure.advise:surveyed", job) as plan:

        def enough() -> bool:
            done = max((note["steps"] for note in plan.notes("progress")), default=0)
            told = "weighing hooks" if not done else f"step {done} of about {TYPICAL_STEPS}"
            report(0.5 + min(done / TYPICAL_STEPS, 1.0) / 2, told)
            return bool(plan.notes("survey"))

        follow(plan, script, ranks["nproc"], ranks["torchrun"], enough=enough)
        notes = plan.notes("survey")
        if not notes and found is not None:
            raise ScriptFailed(f"the script trained too few steps to try the hooks: let it train at least {MOST_STEPS}")
        return notes[0] if notes else None


def _compute_of(found: Headroom) -> dict[str, Any]:
    step_s = statistics.median(found.without_s)
    backward_s = min(found.backward.backward_s or step_s * 2 / 3, step_s)
    cores = max((os.cpu_count() or 1) / found.ranks, 0.5)
    return {
        "forward_s": step_s - backward_s,
        "came_s": dict(found.backward.came_s),
        "backward_s": backward_s,
        "cores": cores,
        "threads": min(torch.get_num_threads(), max(1, round(cores))),
    }


def surveyed(model: DistributedDataParallel, plan: Plan) -> None:
    """Survey the first model of the script, and leave a note."""
    if plan.folder in _taken:
        return
    _taken.add(plan.folder)
    link, progress = plan.job["link"], plan.new_note("progress")
    settings = Auto(hooks=plan.job["hooks"], max_error=plan.job["max_error"], recheck=1 << 60)
    cap_bytes = model.bucket_bytes_cap
    with emulate(link) if link else nullcontext():
        hook = attach(model, Exact())
    bucket_mb = None if model.bucket_bytes_cap == cap_bytes else model.bucket_bytes_cap / MIB

    def publish(told: dict[str, Any]) -> None:
        if hook.rank == 0:
            plan.write(plan.new_note("survey"), {**told, "bucket_mb": bucket_mb})

    def count(steps: int) -> None:
        plan.write(progress, {"steps": steps})

    hook.pilot = Survey(hook, settings, compute=plan.job["compute"], link=link, publish=publish, count=count)
