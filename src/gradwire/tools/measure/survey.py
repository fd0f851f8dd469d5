"""Survey: measures every hook on a model while a script trains it.

It is a pilot like that of `auto`, but it looks at every hook: at the error of each on the model's own gradients, at the
step time that the cost model predicts from the model's buckets, the link and the compute without communication, and at
the measured step time of the most promising ones.
"""

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
from gradwire.engine.runner import Meter
from gradwire.engine.stats import Stats
from gradwire.exchanges import exchange
from gradwire.tools.launch.link import Link
from gradwire.tools.measure.compute import Compute
from gradwire.tools.measure.cost import Prediction, Wire, predict_step
from gradwire.tools.measure.probe import probe
from gradwire.tools.measure.rehearse import BucketLayout, rehearse
from gradwire.tools.measure.uncertainty import uncertainty

MEASURED = 4
"""The number of most promising hooks that are measured, besides `exact` and `bf16`."""
ALWAYS = ("exact", "bf16")
ROUNDS = 4
TYPICAL_STEPS = WARM_STEPS + 2 + (MEASURED + len(ALWAYS)) * (ROUNDS * TURN_STEPS + 1)
MOST_STEPS = 2 * TYPICAL_STEPS
"""With feedback: the step after a hook with feedback does not count."""
UNKNOWN: Mapping[str, Any] = {
    "forward_s": 0.0,
    "backward_s": 0.0,
    "came_s": {},
    "timeline": None,
    "spread": 0.0,
    "cores": 1.0,
    "threads": 1,
    "crowd": 1.0,
}
"""What is not known of the compute, and on ranks whose prediction is not used."""


class Survey(Pilot):
    """Calls `publish` with the results, once, when everything is measured."""

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
        """`compute` describes a step without communication, on rank 0; `count` gets the number of steps done."""
        super().__init__(hook, settings)
        self._compute: Mapping[str, Any] = {**UNKNOWN, **(compute or {})}
        self._link, self._publish, self._count = link, publish, count
        self._predicted: dict[str, Prediction] = {}
        self._meters: dict[str, Meter] = {}
        """What the counted steps of each hook have done. On an accelerator their times come later."""
        self._measured = Trial({})
        self._published = False

    def on_step(self) -> None:
        """As for `auto`."""
        super().on_step()
        self._count(self._step)

    def _candidates(self) -> list[str]:
        """The hooks within the error that are predicted to be among the fastest."""
        self._predicted = self._predict_all()
        fit = super()._candidates()
        promising = self._promising(sorted(fit, key=lambda spec: self._predicted[spec].step_s))
        return [spec for spec in fit if spec in promising]

    def _promising(self, fastest: Sequence[str]) -> list[str]:
        """What to measure, from the hooks within the error in the order of their predictions."""
        return [*fastest[:MEASURED], *ALWAYS]

    def _new_trial(self, errors: Mapping[str, float]) -> Trial:
        """A trial that keeps all steps of all hooks, for the report."""
        return Trial(errors, survey=ROUNDS)

    def _predict_all(self) -> dict[str, Prediction]:
        """The predictions of rank 0, on all ranks: their machines may differ, but their decisions must not."""
        hook = self._hook
        layouts = [hook.layouts[index] for index in sorted(hook.layouts)]
        probed = probe(hook, pairs=False)
        wire: Wire = Link.parse(self._link) if self._link else probed
        compute = _compute(self._compute, layouts)
        if not hook.runner.overlaps:  # the backward pass and the hook have a stream each
            compute = replace(compute, cores=2.0, threads=1, crowd=1.0)
        spreads = 0.0 if self._link else probed.spread, self._compute["spread"]

        def predicted(spec: str) -> Prediction:
            traces = rehearse(exchange(spec), layouts, hook.size, device=hook.device)

            def on(wire: Wire, slower: float = 1.0) -> Prediction:
                at_once = hook.runner.in_flight
                return predict_step(traces, wire, compute.slower(slower), probed.cpu_cost, at_once=at_once)

            return replace(on(wire), uncertainty=uncertainty(lambda *how: on(*how).step_s, wire, *spreads))

        return self._of_first({spec: predicted(spec) for spec in self._names})

    def _of_first(self, found: Mapping[str, Prediction]) -> dict[str, Prediction]:
        """The predictions with the step times of rank 0."""
        hook = self._hook
        times = torch.tensor([value.step_s for value in found.values()], dtype=torch.float64, device=hook.device)
        first = hook.gather(times)[0].tolist()
        return {spec: replace(value, step_s=step_s) for (spec, value), step_s in zip(found.items(), first, strict=True)}

    def _take_turns(self, trial: Trial) -> None:
        """As for `auto`, with a meter for each hook."""
        self._hook.runner.meter = self._hook.runner.meter.fresh()  # a switch resets it
        super()._take_turns(trial)
        if self._trial is not None and self._counts:
            self._hook.runner.meter = self._meters.setdefault(str(self._hook.exchange), self._hook.runner.meter)

    def _decide(self, trial: Trial) -> None:
        """As for `auto`."""
        self._measured = trial
        super()._decide(trial)

    def _settle(self, spec: str, reason: str) -> None:
        super()._settle(spec, reason)
        if not self._published:
            self._published = True
            params = sum(segment.numel for layout in self._hook.layouts.values() for segment in layout)
            self._publish({"rows": self._rows(), "params": params})

    def _rows(self) -> list[dict[str, Any]]:
        medians, steps_s = self._measured.medians, self._measured.step_s
        stats = self._stats()
        return [
            {
                "hook": spec,
                "predicted_s": self._predicted[spec].step_s,
                "uncertainty": self._predicted[spec].uncertainty,
                "measured_s": medians.get(spec),
                "error": self._errors[spec],
                "sent_bytes": self._predicted[spec].sent_bytes,
                "step_s": steps_s.get(spec, []),
                "split": _split(stats.get(spec), steps_s.get(spec, [])),
            }
            for spec in self._names
        ]

    def _stats(self) -> dict[str, Stats]:
        """What each hook has done in a step."""
        return {spec: meter.stats(spec) for spec, meter in self._meters.items()}


def _split(stats: Stats | None, step_s: Sequence[float]) -> dict[str, float] | None:
    """The parts of the median step on this rank, as in `records.Split`."""
    if stats is None or not stats.timed_steps or not step_s:
        return None
    work = {"encode_s": stats.encode_s, "wire_s": stats.wire_s, "decode_s": stats.decode_s}
    wait_s = min(stats.wait_s, statistics.median(step_s))
    return {"compute_s": statistics.median(step_s) - wait_s, **work, "wait_s": wait_s}


def _compute(found: Mapping[str, Any], layouts: Sequence[BucketLayout]) -> Compute:
    """From a step without communication. A bucket is ready when the gradients of all its parameters are ready.

    If these times are not known, buckets get ready at equal distances.
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
        crowd=found["crowd"],
    )
