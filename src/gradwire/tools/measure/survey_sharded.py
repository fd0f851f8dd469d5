"""ShardedSurvey: the survey of `gradwire advise` for models with `fully_shard`, over pairs of a spec and a gather."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gradwire._torch.fsdp import gathered_dtype, reduced_dtype
from gradwire.auto.pilot import Pilot
from gradwire.auto.sharded import Paired, split_pair
from gradwire.auto.trial import Trial
from gradwire.engine.stats import Stats
from gradwire.exchanges import exchange
from gradwire.exchanges.coded import Coded
from gradwire.models.fsdp import shards_of
from gradwire.models.sharded_checks import units_of
from gradwire.tools.launch.link import Link
from gradwire.tools.measure.alternate_sharded import Timeline
from gradwire.tools.measure.cost import Engine, Prediction, Wire
from gradwire.tools.measure.cost_sharded import Direction, predict_sharded
from gradwire.tools.measure.probe import probe
from gradwire.tools.measure.rehearse import UnitLayout, rehearse_gather, rehearse_scatter
from gradwire.tools.measure.survey import MEASURED, Survey
from gradwire.tools.measure.uncertainty import uncertainty

SAFE = ("exact", "bf16", "fp16")
"""Gathers that may be recommended. With fewer bits the model computes with other parameters."""
GATHERS = ("exact", "bf16", "int8")
"""The gathers that are tried."""
ALWAYS = ("exact", "bf16/bf16")
NO_STEP = Timeline(0.0, ())


def changes_weights(name: str) -> bool:
    """Whether the model computes with parameters of fewer than 16 bits under this pair."""
    return split_pair(name)[1] not in SAFE


def layouts_of(model: nn.Module) -> list[UnitLayout]:
    """The messages of each unit of a model."""
    units = units_of(model)
    dtypes = [(gathered_dtype(unit.params[0]), reduced_dtype(unit.params[0])) for unit in units]
    return [UnitLayout(tuple(shards_of(unit)), *types) for unit, types in zip(units, dtypes, strict=True)]


class ShardedSurvey(Paired, Survey):
    """Measures pairs. `units` are the messages of the model; `compute` has the timeline of a step."""

    def __init__(self, *args: Any, units: Sequence[UnitLayout], **options: Any) -> None:
        self._units = units
        self._steps_done: dict[str, list[Stats]] = {}
        self._parameters: dict[str, float] = {}
        super().__init__(*args, **options)

    def _promising(self, fastest: Sequence[str]) -> list[str]:
        """Also the fastest one that may not be recommended, so that its gain is known."""
        safe = [name for name in fastest if not changes_weights(name)]
        return [*safe[:MEASURED], *[name for name in fastest if changes_weights(name)][:1], *ALWAYS]

    def _predict_all(self) -> dict[str, Prediction]:
        hook, given = self._hook, self._compute
        probed = probe(hook, pairs=False)
        wire: Wire = Link.parse(self._link) if self._link else probed
        split = {name: split_pair(name) for name in self._names}
        scatters = {spec: rehearse_scatter(exchange(spec), self._units, hook.size) for spec, _ in split.values()}
        gathers = {gather: rehearse_gather(exchange(gather), self._units, hook.size) for _, gather in split.values()}
        timeline = Timeline.from_json(given["timeline"]) or NO_STEP
        shares: dict[str, Any] = {name: given[name] for name in ("cores", "threads", "crowd")}
        spreads = 0.0 if self._link else probed.spread, given["spread"]

        def predicted(name: str) -> Prediction:
            spec, gather = split[name]
            plain = [not isinstance(exchange(each), Coded) for each in (spec, gather)]

            def on(wire: Wire, slower: float = 1.0) -> tuple[Prediction, float]:
                scatter = Direction(scatters[spec], Engine(wire), blocks=plain[0], measured=plain[0])
                gathered = Direction(gathers[gather], Engine(wire), blocks=plain[1], measured=plain[1])
                return predict_sharded(timeline.slower(slower), scatter, gathered, cpu_cost=probed.cpu_cost, **shares)

            made, self._parameters[name] = on(wire)
            return replace(made, uncertainty=uncertainty(lambda *how: on(*how)[0].step_s, wire, *spreads))

        return self._of_first({name: predicted(name) for name in self._names})

    def _take_turns(self, trial: Trial) -> None:
        if self._counts:
            self._steps_done.setdefault(self._current(), []).append(self._sharded.stats())
        Pilot._take_turns(self, trial)  # statistics are kept by step here, as two meters take part
        self._sharded.reset_stats()

    def _stats(self) -> dict[str, Stats]:
        return {name: _mean(steps) for name, steps in self._steps_done.items()}

    def _rows(self) -> list[dict[str, Any]]:
        return [{**row, "gather_bytes": self._parameters[row["hook"]]} for row in super()._rows()]


def _mean(steps: Sequence[Stats]) -> Stats:
    fields: Mapping[str, float] = {
        name: statistics.fmean(getattr(step, name) for step in steps)
        for name in ("encode_s", "wire_s", "decode_s", "wait_s")
    }
    return replace(steps[0], timed_steps=len(steps), **fields)  # type: ignore[arg-type]
