"""simulate(): predicts step times of hooks on more ranks, and on other links, than this machine has.

The averaged model consists of equal transformer blocks, one bucket each. A third of the compute is forward and the rest
is backward, in which the buckets get ready at equal distances. Chunks are rehearsed on one core of this machine for
exactly that number of ranks, so the times include everything that a hook does there.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gradwire.errors import SpecError
from gradwire.exchanges import Exact, Exchange, TwoLevel, exchange
from gradwire.exchanges.bucket import segments_of
from gradwire.testing import Rank, thread_ranks
from gradwire.tools.launch.launch import Report
from gradwire.tools.launch.link import Link
from gradwire.tools.measure.compute import Compute
from gradwire.tools.measure.cost import Prediction, predict_step
from gradwire.tools.measure.rehearse import BucketLayout, Trace, rehearse
from gradwire.tools.records.recommend import BASELINE, Option, recommend

MAX_RANKS = 4096
MODES = ("ddp", "fsdp", "hsdp")
NOISE_RANKS = 4
NOISE_SHAPES = ((512, 512), (512,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What to predict."""

    ranks: tuple[int, ...]
    links: tuple[Link, ...]
    compute_s: float
    """A step without communication."""
    params: int = 124_000_000
    cores: float = 1.0
    """The cores of each rank; with 1, encoding takes its time from the backward pass."""
    codec_speed: float = 1.0
    """How many times as fast a core is as one of this machine."""
    mode: str = "ddp"
    """One of MODES. For the others see `simulate_sharded.py`."""
    shards: int = 8
    """For `hsdp`: the number of ranks that parameters are sharded over, inside a node."""
    inside: Link | None = None
    """For `hsdp`: the link of each rank inside its node; None: one that takes no time."""

    def __post_init__(self) -> None:
        if not self.ranks or not all(2 <= count <= MAX_RANKS for count in self.ranks):
            raise SpecError(f"simulate: ranks must be between 2 and {MAX_RANKS}, got {list(self.ranks)}")
        if self.mode not in MODES:
            raise SpecError(f"simulate: mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.shards < 1:
            raise SpecError(f"simulate: shards must be at least 1, got {self.shards}")
        if not self.links:
            raise SpecError("simulate: no link to predict for")
        if not 1000 <= self.params <= 10**12:
            raise SpecError(f"simulate: params must be between 1000 and 10^12, got {self.params}")
        for name in ("compute_s", "cores", "codec_speed"):
            if not 0 < getattr(self, name) < 1e9:
                raise SpecError(f"simulate: {name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predictions for one hook on every link and number of ranks."""

    hook: str
    averages: bool
    """A hook that does not average only shows the limit of what any hook can gain."""
    error: float
    """Error of the mean, relative to the mean, on random values (`noise_error`)."""
    predictions: tuple[tuple[Prediction, ...], ...]
    """One row for each of `Scene.links`, in the order of `Scene.ranks`."""
    changes_weights: bool = False
    """With `fsdp`: the model computes with parameters of fewer than 16 bits. Such a hook is never picked."""

    @property
    def mark(self) -> str:
        """What stands behind its name where there is a note below."""
        return " †" if not self.averages else " ‡" if self.changes_weights else ""


@dataclass(frozen=True, slots=True)
class Pick:
    """The hook to use on one link and number of ranks; `exact` means not to compress."""

    hook: str
    step_s: float
    speed_up: float
    """Relative to `exact`."""


def simulate(hooks: Sequence[str], scene: Scene, *, report: Report = lambda part, doing: None) -> list[Forecast]:
    """Predict the step time of hooks on more ranks than there are.

    Args:
        hooks: Specs, in the order of the result. `exact`, the baseline, comes first if it is not among them.
        scene: The model, the link, the ranks and the time that a step computes.
        report: Called with the part that is done and what is being done.

    Returns:
        A forecast for each hook.

    Examples:
        >>> gradwire.advisor.simulate(["bf16", "int8"], scene)
    """
    named = list(dict.fromkeys(exchange(hook) for hook in hooks))
    exchanges = named if Exact() in named else [Exact(), *named]
    layouts, found = blocks(scene.params), []
    with one_thread():
        for index, each in enumerate(exchanges):
            columns = []
            for at, size in enumerate(scene.ranks):
                report((index + at / len(scene.ranks)) / len(exchanges), f"{each} on {size} ranks")
                columns.append(_predict(each, layouts, size, scene))
            found.append(Forecast(str(each), each.lanes > 0, noise_error(each), tuple(zip(*columns, strict=True))))
    return found


def picks(forecasts: Sequence[Forecast], scene: Scene, max_error: float = math.inf) -> list[list[Pick]]:
    """The recommended hooks with at most this error, by link and number of ranks."""
    usable = [each for each in forecasts if each.averages and not each.changes_weights]
    fit = [each for each in forecasts if each.hook == BASELINE or (each in usable and each.error <= max_error)]
    return [[_pick(fit, row, at) for at in range(len(scene.ranks))] for row in range(len(scene.links))]


def _pick(fit: Sequence[Forecast], row: int, at: int) -> Pick:
    times_s = {forecast.hook: forecast.predictions[row][at].step_s for forecast in fit}
    hook = recommend([Option(hook=each.hook, step_s=times_s[each.hook], error=each.error) for each in fit]).hook
    step_s = times_s[hook or BASELINE]
    return Pick(hook or BASELINE, step_s, times_s[BASELINE] / step_s)


def as_dict(forecasts: Sequence[Forecast], scene: Scene, limits: Sequence[float]) -> dict[str, Any]:
    """Plain values for JSON; no limit is None there."""
    picked = [
        {
            "max_error": limit if math.isfinite(limit) else None,
            "cells": [
                {"link": str(link), "ranks": ranks, **dataclasses.asdict(pick)}
                for link, row in zip(scene.links, picks(forecasts, scene, limit), strict=True)
                for ranks, pick in zip(scene.ranks, row, strict=True)
            ],
        }
        for limit in limits
    ]
    return {
        "scene": {
            **dataclasses.asdict(scene),
            "links": [str(link) for link in scene.links],
            "inside": None if scene.inside is None else str(scene.inside),
        },
        "hooks": [dataclasses.asdict(forecast) for forecast in forecasts],
        "picks": picked,
    }


def blocks(params: int) -> list[BucketLayout]:
    """The buckets of a transformer with about this many parameters and the usual width. They take no memory."""
    width = 64 * max(1, round(12 * (params / 124e6) ** (1 / 3)))
    shapes = {
        "norm1": (2, width),
        "qkv": (3 * width, width),
        "out": (width, width),
        "norm2": (2, width),
        "up": (4 * width, width),
        "up_bias": (4 * width,),
        "down": (width, 4 * width),
    }
    tensors = [torch.empty(shape, device="meta") for shape in shapes.values()]
    count = max(1, round(params / sum(tensor.numel() for tensor in tensors)))
    return [segments_of(tensors, list(shapes))] * count


def _predict(each: Exchange, layouts: Sequence[BucketLayout], size: int, scene: Scene) -> list[Prediction]:
    """Predictions for every link from one rehearsal."""
    traces = faster(rehearse(each, layouts, size), scene.codec_speed)
    backward_s = scene.compute_s * 2 / 3
    ready_s = tuple(backward_s * (index + 1) / len(layouts) for index in range(len(layouts)))
    forward_s = scene.compute_s - backward_s
    compute = Compute(forward_s=forward_s, ready_s=ready_s, backward_s=backward_s, cores=scene.cores)
    return [predict_step(traces, link, compute) for link in scene.links]


def faster(buckets: Sequence[Sequence[Trace]], times: float) -> list[list[Trace]]:
    """The traces on a core that is `times` as fast."""
    return [[_faster(trace, times) for trace in traces] for traces in buckets]


def _faster(trace: Trace, times: float) -> Trace:
    sends = tuple(dataclasses.replace(send, work_s=send.work_s / times) for send in trace.sends)
    return Trace(sends, trace.work_s / times)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def noise_error(exchange: Exchange) -> float:
    """Error of the mean, relative to the mean, of one step on 4 ranks with independent normal values.

    Gradients of different ranks are alike, and have a structure that low rank and top-k use: their error is smaller.
    """
    if isinstance(exchange, TwoLevel):
        exchange = cast(Exchange, dataclasses.replace(exchange, node=NOISE_RANKS // 2))
    flats = [torch.cat([grad.view(-1) for grad in _gradients(rank)]) for rank in range(NOISE_RANKS)]
    mean = torch.stack(flats).double().mean(0)

    def run(rank: Rank) -> Tensor:
        return rank.mean(exchange, _gradients(rank.rank)).flat.double()

    lost = thread_ranks(NOISE_RANKS, run)[0] - mean
    return float(lost.norm() / mean.norm())


def _gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in NOISE_SHAPES]
