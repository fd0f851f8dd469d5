"""simulate() for models with `fully_shard`: FSDP, and HSDP with shards inside a node and replicas across nodes.

The model is that of `simulate.py`, with one unit for each block. A step gathers each block before its forward pass and,
in advance, before its backward pass, and reduces its gradients after it, as FSDP2 does on the CPU with its defaults.
Its own collectives are those of gloo, whose reduce-scatter is an all-reduce and sends twice as much as it needs to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.auto.sharded import HOOKS, pair_name, split_pair
from gradwire.errors import SpecError
from gradwire.exchanges import Exchange, exchange
from gradwire.exchanges.bucket import Bucket, Segment, segments_of
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.sharded import Shard, scatter_reference
from gradwire.tools.launch.launch import Report
from gradwire.tools.launch.link import Link
from gradwire.tools.measure.alternate_sharded import Event, Timeline
from gradwire.tools.measure.cost import Engine, Prediction
from gradwire.tools.measure.cost_sharded import Direction, predict_sharded
from gradwire.tools.measure.rehearse import UnitLayout, rehearse, rehearse_gather, rehearse_scatter
from gradwire.tools.measure.simulate import (
    NOISE_RANKS,
    NOISE_SHAPES,
    Forecast,
    Scene,
    blocks,
    faster,
    noise_error,
    one_thread,
)
from gradwire.tools.measure.survey_sharded import GATHERS, changes_weights

PAIRS = tuple(pair_name(*pair) for pair in itertools.product(HOOKS, GATHERS))
"""The hooks of FSDP."""
REPLICAS = ("exact", "bf16", "int8", "int4", "powersgd")
"""The hooks of HSDP."""
NO_LINK = Link(1e18)


def simulate_sharded(
    hooks: Sequence[str], scene: Scene, *, report: Report = lambda part, doing: None
) -> list[Forecast]:
    """Predict every hook, in the given order. `exact`, the baseline, comes first if it is not among them.

    With `mode="fsdp"` a hook is a pair such as `int8/bf16`: how gradients are reduced, and parameters gathered. With
    `mode="hsdp"` it is how gradients are averaged across replicas; inside a node everything is exact.
    """
    named = [str(exchange(each)) if scene.mode == "hsdp" else pair_name(*split_pair(each)) for each in hooks]
    names, found = list(dict.fromkeys(named if "exact" in named else ["exact", *named])), []
    with one_thread():
        for index, name in enumerate(names):
            columns = []
            for at, ranks in enumerate(scene.ranks):
                report((index + at / len(scene.ranks)) / len(names), f"{name} on {ranks} ranks")
                columns.append((_predict_hsdp if scene.mode == "hsdp" else _predict_fsdp)(name, ranks, scene))
            found.append(_forecast(name, scene, tuple(zip(*columns, strict=True))))
    return found


def _forecast(name: str, scene: Scene, predictions: tuple[tuple[Prediction, ...], ...]) -> Forecast:
    if scene.mode == "hsdp":
        each = exchange(name)
        return Forecast(name, each.lanes > 0, noise_error(each), predictions)
    each = exchange(split_pair(name)[0])
    return Forecast(name, each.averages, scatter_error(each), predictions, changes_weights(name))


def _predict_fsdp(name: str, ranks: int, scene: Scene) -> list[Prediction]:
    """Predictions for every link from one rehearsal."""
    units, (spec, gather) = layouts(scene.params, ranks), map(exchange, split_pair(name))
    scatters = faster(rehearse_scatter(spec, units, ranks), scene.codec_speed)
    gathers = faster(rehearse_gather(gather, units, ranks), scene.codec_speed)
    timeline = timeline_of(len(units), scene.compute_s)
    return [
        predict_sharded(
            timeline,
            Direction(scatters, Engine(link), blocks=not isinstance(spec, Coded)),
            Direction(gathers, Engine(link), blocks=not isinstance(gather, Coded)),
            cores=scene.cores,
        )[0]
        for link in scene.links
    ]


def _predict_hsdp(name: str, ranks: int, scene: Scene) -> list[Prediction]:
    """The same for replicas of `scene.shards` ranks each."""
    shards, replicas = scene.shards, ranks // scene.shards
    if ranks % shards or replicas < 2:
        raise SpecError(
            f"simulate: {ranks} ranks are not two or more replicas of {shards} shards; change ranks or shards"
        )
    units, exact = layouts(scene.params, shards), exchange("exact")
    averages = faster(rehearse(exchange(name), map(_local, units), replicas), scene.codec_speed)
    timeline, inside = timeline_of(len(units), scene.compute_s), scene.inside or NO_LINK
    scatters, gathers = rehearse_scatter(exact, units, shards), rehearse_gather(exact, units, shards)
    return [
        predict_sharded(
            timeline,
            Direction(scatters, Engine(inside), blocks=True),
            Direction(gathers, Engine(inside), blocks=True),
            Direction(averages, Engine(link)),
            cores=scene.cores,
        )[0]
        for link in scene.links
    ]


def layouts(params: int, shards: int) -> list[UnitLayout]:
    """The messages of the blocks of a transformer, cut over so many ranks."""
    made: dict[int, UnitLayout] = {}
    return [made.setdefault(id(layout), _unit(layout, shards)) for layout in blocks(params)]


def _unit(layout: Sequence[Segment], shards: int) -> UnitLayout:
    return UnitLayout(tuple(_shard(segment.name, segment.param, shards) for segment in layout))


def _shard(name: str, param: Tensor, shards: int) -> Shard:
    whole = param.shape if min(param.shape) > 2 else torch.Size([param.numel()])  # the two vectors of a norm
    padded = torch.Size([-(-whole[0] // shards), *whole[1:]])
    return Shard(name, torch.empty(whole, device="meta"), whole, padded, 0)


def _local(unit: UnitLayout) -> tuple[Segment, ...]:
    """What a rank averages with the other replicas."""
    return segments_of(
        [torch.empty(shard.padded, device="meta") for shard in unit.shards], [shard.name for shard in unit.shards]
    )


def timeline_of(units: int, compute_s: float) -> Timeline:
    """A step of equal units: a third of the compute is forward, the rest backward."""
    forward_s, events = compute_s / 3, list[Event]()
    for unit in range(units):
        at_s = forward_s * unit / units
        events += [Event("gather", unit, at_s, 0.0), Event("need", unit, at_s, 0.0)]
    events.append(Event("gather", units - 1, forward_s, 0.0))
    for done, unit in enumerate(reversed(range(units))):
        at_s, over_s = (forward_s + (compute_s - forward_s) * count / units for count in (done, done + 1))
        events.append(Event("need", unit, at_s, 0.0))
        events += [Event("gather", unit - 1, at_s, 0.0)] if unit else []  # in advance
        events.append(Event("reduce_late", unit, over_s, 0.0))
    return Timeline(compute_s, (*events, Event("end", 0, compute_s, 0.0)))


def scatter_error(each: Exchange) -> float:
    """Error of the reduce-scatter, relative to the mean, on 4 ranks with independent normal values."""
    if not isinstance(each, Coded):
        return 0.0
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.empty(shape, device="meta") for shape in NOISE_SHAPES]
    row = segments_of(tensors, [str(at) for at in range(len(tensors))])
    numel = sum(segment.numel for segment in row)
    everyone = [torch.randn(NOISE_RANKS, numel, generator=generator) for _ in range(NOISE_RANKS)]
    bucket = Bucket(0, everyone[0][0], row, is_last=False)
    mean = torch.stack(everyone).double().mean(0)
    lost = scatter_reference(each, everyone, bucket, 1 / NOISE_RANKS).mean.double() - mean
    return float(lost.norm() / mean.norm())
