"""Survey: what each hook would cost and lose on a model, found while a script trains it.

A pilot like `auto`'s, that looks at every hook there is: the error of each on the model's own gradients; the step time
of each as the cost model predicts it, from the model's buckets, the link, and the compute without communication; and
the step time of the most promising ones as it is.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradwire.auto.pilot import TURN_STEPS, WARM_STEPS, Pilot
from gradwire.auto.settings import Auto
from gradwire.auto.trial import Trial
from gradwire.engine.hook import Hook
from gradwire.engine.stats import Stats
from gradwire.exchanges import exchange
from gradwire.tools.launch.link import Link
from gradwire.tools.measure.cost import Compute, Prediction, Wire, predict_step
from gradwire.tools.measure.probe import probe
from gradwire.tools.measure.rehearse import Layout, rehearse

MEASURED = 4
"""So many of the most promising hooks are measured, besides `exact` and `bf16`."""
ALWAYS = ("exact", "bf16")
ROUNDS = 4
TYPICAL_STEPS = WARM_STEPS + 2 + (MEASURED + len(ALWAYS)) * (ROUNDS * TURN_STEPS + 1)
MOST_STEPS = 2 * TYPICAL_STEPS
"""With hooks that have feedback, after which a step does not count."""
UNKNOWN: Mapping[str, Any] = {"forward_s": 0.0, "backward_s": 0.0, "came_s": {}, "cores": 1.0, "threads": 1}
"""On ranks whose prediction does not count."""


class Survey(Pilot):
    """Tells `publish` what it found, once, when all is measured."""

    def __init__(
        self,
        hook: Hook,
        settings: Auto,
        *,
        compute: Mapping[str, Any] | None,
        link: str | None,
        publish: Callable[[dict[str, Any]], None],
        count: Callable[[int], None],
    ) -> None:
        """`compute` is what rank 0 knows of a step without communication; `count` is told how many steps are done."""
        super().__init__(hook, settings)
        self._compute, self._link, self._publish, self._count = compute, link, publish, count
        self._predicted: dict[str, Prediction] = {}
        self._stats: dict[str, list[Stats]] = {}
        self._measured = Trial({})
        self._told = False

    def on_step(self) -> None:
        """As for `auto`."""
        super().on_step()
        self._count(self._step)

    def _candidates(self) -> list[str]:
        """Within the error, and by prediction among the fastest."""
        self._predicted = self._predict_all()
        fit = super()._candidates()
        promising = sorted(fit, key=lambda spec: self._predicted[spec].step_s)[:MEASURED]
        return [spec for spec in fit if spec in promising or spec in ALWAYS]

    def _new_trial(self, errors: Mapping[str, float]) -> Trial:
        """A report wants all steps of all hooks."""
        return Trial(errors, survey=ROUNDS)

    def _predict_all(self) -> dict[str, Prediction]:
        """As rank 0 works it out, on all ranks: their machines may differ, their decisions must not."""
        hook = self._hook
        layouts = [hook.layouts[index] for index in sorted(hook.layouts)]
        probed = probe(hook, pairs=False)
        wire: Wire = Link.parse(self._link) if self._link else probed
        compute = _compute(self._compute or UNKNOWN, layouts)
        found = {
            spec: predict_step(rehearse(exchange(spec), layouts, hook.size), wire, compute, probed.toll)
            for spec in self.settings.specs
        }
        times = torch.tensor([value.step_s for value in found.values()], dtype=torch.float64)
        first = hook.gather(times)[0].tolist()
        return {spec: replace(value, step_s=step_s) for (spec, value), step_s in zip(found.items(), first, strict=True)}

    def _switch(self, spec: str) -> None:
        if self._trial is not None:
            self._end_turn()
        super()._switch(spec)

    def _end_turn(self) -> None:
        """Keep what the hook has counted in this step."""
        if self._counts:
            self._stats.setdefault(str(self._hook.exchange), []).append(self._hook.stats())
        self._hook.reset_stats()

    def _decide(self, trial: Trial) -> None:
        """As for `auto`."""
        self._end_turn()
        self._measured = trial
        super()._decide(trial)

    def _settle(self, spec: str, reason: str) -> None:
        super()._settle(spec, reason)
        if not self._told:
            self._told = True
            params = sum(segment.numel for layout in self._hook.layouts.values() for segment in layout)
            self._publish({"rows": self._rows(), "params": params})

    def _rows(self) -> list[dict[str, Any]]:
        medians, steps_s = self._measured.medians, self._measured.step_s
        return [
            {
                "hook": spec,
                "predicted_s": self._predicted[spec].step_s,
                "measured_s": medians.get(spec),
                "error": self._errors[spec],
                "sent_bytes": self._predicted[spec].sent_bytes,
                "step_s": steps_s.get(spec, []),
                "split": _split(self._stats.get(spec, []), steps_s.get(spec, [])),
            }
            for spec in self.settings.specs
        ]


def _split(stats: Sequence[Stats], step_s: Sequence[float]) -> dict[str, float] | None:
    """Where the time of the median step goes on this rank, as `bench.records.Split` has it."""
    if not stats or not step_s:
        return None
    work = {key: statistics.fmean(getattr(each, key) for each in stats) for key in ("encode_s", "wire_s", "decode_s")}
    wait_s = min(statistics.fmean(each.wait_s for each in stats), statistics.median(step_s))
    return {"compute_s": statistics.median(step_s) - wait_s, **work, "wait_s": wait_s}


def _compute(found: Mapping[str, Any], layouts: Sequence[Layout]) -> Compute:
    """From a step without communication. A bucket is ready when the gradients of all its parameters are there.

    Where they were not seen, buckets come at equal distances.
    """
    came_s, backward_s = found["came_s"], found["backward_s"]
    ready = [max(came_s.get(segment.name, backward_s) for segment in layout) for layout in layouts]
    if not came_s:
        ready = [backward_s * (index + 1) / len(layouts) for index in range(len(layouts))]
    return Compute(
        forward_s=found["forward_s"],
        ready_s=tuple(itertools.accumulate((min(value, backward_s) for value in ready), max)),
        backward_s=backward_s,
        cores=found["cores"],
        threads=found["threads"],
    )
