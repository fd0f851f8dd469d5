"""ReplicaSurvey: the survey of `gradwire advise` for models with replicas (HSDP), over specs for their average.

Parameters are gathered and gradients reduced inside a node, exactly, as FSDP2 does it by itself; what is tried is the
average across replicas, over the slow link. Ranks with other shards average with other replicas, so the ranks agree in
two steps: across the replicas, and then over the shards.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.auto.pilot import WARM_STEPS
from gradwire.auto.settings import Auto
from gradwire.engine.hook import Hook
from gradwire.engine.sharded import ShardedHook
from gradwire.exchanges import Exact, exchange
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket, Segment, segments_of
from gradwire.models.fsdp import attach_sharded, local_param
from gradwire.models.sharded_checks import units_of
from gradwire.tools.launch.link import Link
from gradwire.tools.measure.alternate_sharded import Timeline
from gradwire.tools.measure.cost import Engine, Prediction, Wire
from gradwire.tools.measure.cost_sharded import Direction, predict_sharded
from gradwire.tools.measure.probe import probe
from gradwire.tools.measure.rehearse import UnitLayout, rehearse, rehearse_gather, rehearse_scatter
from gradwire.tools.measure.survey import Survey

REPLICAS = ("exact", "bf16", "int8", "int4", "powersgd")
"""The specs that are tried by default."""
NO_STEP = Timeline(0.0, ())


def has_replicas(model: nn.Module) -> bool:
    """Whether the model was sharded with a 2-D mesh (FSDP2's own HSDP)."""
    return any(unit.replica_mesh is not None for unit in units_of(model))


def attach_to_native(model: nn.Module) -> ShardedHook:
    """Let gradwire average across the replicas of a model that was sharded with a 2-D mesh.

    FSDP2's own average is switched off, which has no public way: `gradwire.hsdp` builds such a model anew instead.
    """
    units = units_of(model)
    mesh = units[0].replica_mesh
    for unit in units:
        unit.drop_replicas()
    hook = attach_sharded(model, Exact(), Exact(), Exact(), mesh=mesh)
    hook.hold = None  # an emulated link is the one between the replicas
    return hook


class ReplicaSurvey(Survey):
    """Measures specs for the average across replicas. `units` are the messages of the model."""

    def __init__(self, hook: ShardedHook, settings: Auto, *, units: Sequence[UnitLayout], **options: Any) -> None:
        assert hook.replicas is not None
        self._sharded, self._units = hook, units
        super().__init__(hook.replicas, settings, **options)

    def on_bucket(self, bucket: Bucket) -> None:
        """The rows of a unit's gradients, (size, n): keep the shard that this rank averages with the replicas."""
        if self._step != WARM_STEPS + 1:
            return
        rows, found = bucket.flat, list[Tensor]()
        self._sharded.run(lambda comm: found.append(_mean_row(rows, comm)))
        shards = [self._sharded.shards[segment.name] for segment in bucket.segments]
        segments = tuple(Segment(s.name, local_param(s, found[0]), 0, s.padded.numel()) for s in shards)
        self._aside.append((replace(bucket, flat=found[0], segments=segments), found[0].clone()))

    def _measure_errors(self) -> dict[str, float] | None:
        """As for DDP models, over the shards of all ranks."""
        exact = [values.double() for _, values in self._aside]
        for values in exact:
            values.copy_(self._hook.gather(values).mean(0))
        lost = [self._error(name, exact, 1.0) ** 2 for name in self._names]
        mine = torch.tensor([sum(float(mean.square().sum()) for mean in exact), *lost], dtype=torch.float64)
        total, *lost = _of_all(self._sharded, mine).sum(0).tolist()
        if not 0.0 < total < math.inf:
            return None
        return {name: math.sqrt(value / total) for name, value in zip(self._names, lost, strict=True)}

    def _slowest(self, times: Sequence[float]) -> list[float]:
        mine = torch.tensor(super()._slowest(times), dtype=torch.float64)
        return _of_all(self._sharded, mine).amax(0).tolist()

    def _of_first(self, found: Mapping[str, Prediction]) -> dict[str, Prediction]:
        first = super()._of_first(found)
        times = torch.tensor([value.step_s for value in first.values()], dtype=torch.float64)
        steps_s = _of_all(self._sharded, times)[0].tolist()
        return {spec: replace(value, step_s=s) for (spec, value), s in zip(first.items(), steps_s, strict=True)}

    def _predict_all(self) -> dict[str, Prediction]:
        hook, inside = self._hook, self._sharded.size
        given = self._compute or {"timeline": None, "cores": 1.0, "threads": 1}
        probed = probe(hook, pairs=False)
        wire: Wire = Link.parse(self._link) if self._link else probed
        scatters, gathers = (run(Exact(), self._units, inside) for run in (rehearse_scatter, rehearse_gather))
        found, local = {}, [_local(unit) for unit in self._units]
        for spec in self._names:
            averages = Direction(rehearse(exchange(spec), local, hook.size), Engine(wire))
            predicted, _ = predict_sharded(
                timeline := Timeline.from_json(given["timeline"]) or NO_STEP,
                Direction(scatters, Engine(wire), blocks=True, measured=True),
                Direction(gathers, Engine(wire), blocks=True, measured=True),
                averages,
                cores=given["cores"],
                threads=given["threads"],
                cpu_cost=probed.cpu_cost,
            )
            across = sum(averages.bytes_of(event.unit) for event in timeline.events if event.what.startswith("reduce"))
            found[spec] = replace(predicted, sent_bytes=across)
        return self._of_first(found)


def _mean_row(rows: Tensor, comm: Comm) -> Tensor:
    """The exact mean of this rank's row over the shards."""
    return comm.all_to_all(rows.contiguous()).float().mean(0)


def _of_all(hook: Hook, values: Tensor) -> Tensor:
    """The values of all shards."""
    return hook.gather(values.to(hook.device))


def _local(unit: UnitLayout) -> tuple[Segment, ...]:
    """What a rank averages with the other replicas."""
    tensors = [torch.empty(shard.padded, device="meta") for shard in unit.shards]
    return segments_of(tensors, [shard.name for shard in unit.shards])
