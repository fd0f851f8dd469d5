"""simulate(): step times of hooks on more ranks, and on other links, than there are here, by the cost model.

The model that is averaged is made of equal transformer blocks, a bucket each. A third of the compute is forward, the
rest backward, in which the blocks' buckets get ready at even distances. Chunks are rehearsed on one core of this
machine at the very number of ranks, so all that a hook does there is in its time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.errors import SpecError
from gradwire.exchanges import Exact, Exchange, exchange
from gradwire.exchanges.bucket import segments_of
from gradwire.tools.launch.link import Link
from gradwire.tools.measure.advise import worth_most
from gradwire.tools.measure.cost import Compute, Prediction, predict_step
from gradwire.tools.measure.noise import noise_error
from gradwire.tools.measure.rehearse import Course, Layout, rehearse

MAX_RANKS = 4096
Report = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What to predict."""

    ranks: tuple[int, ...]
    links: tuple[Link, ...]
    compute_s: float
    """A step without communication."""
    params: int = 124_000_000
    cores: float = 1.0
    """Of each rank; with 1, encoding takes its time from the backward pass."""
    codec_speed: float = 1.0
    """Times as fast as a core of this machine."""

    def __post_init__(self) -> None:
        if not self.ranks or not all(2 <= count <= MAX_RANKS for count in self.ranks):
            raise SpecError(f"simulate: ranks must be between 2 and {MAX_RANKS}, got {list(self.ranks)}")
        if not self.links:
            raise SpecError("simulate: no link to predict for")
        if not 1000 <= self.params <= 10**12:
            raise SpecError(f"simulate: params must be between 1000 and 10^12, got {self.params}")
        for name in ("compute_s", "cores", "codec_speed"):
            if not 0 < getattr(self, name) < 1e9:
                raise SpecError(f"simulate: {name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Outlook:
    """One hook on every link and number of ranks."""

    hook: str
    averages: bool
    """Without, it is no more than the limit of what any hook can gain."""
    error: float
    """Of the mean, relative to the mean, on random values (`noise_error`)."""
    predictions: tuple[tuple[Prediction, ...], ...]
    """A row for each of `Scene.links`, in the order of `Scene.ranks`."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The hook to use on one link and number of ranks; `exact`: do not compress."""

    hook: str
    step_s: float
    speed_up: float
    """Over `exact`."""


def simulate(hooks: Sequence[str], scene: Scene, *, report: Report = lambda part, doing: None) -> list[Outlook]:
    """Predict every hook, in the order given. `exact`, which the others are compared with, comes first if not named."""
    named = list(dict.fromkeys(exchange(hook) for hook in hooks))
    exchanges = named if Exact() in named else [Exact(), *named]
    layouts, found = blocks(scene.params), []
    with one_thread():
        for index, each in enumerate(exchanges):
            columns = []
            for at, size in enumerate(scene.ranks):
                report((index + at / len(scene.ranks)) / len(exchanges), f"{each} on {size} ranks")
                columns.append(_predict(each, layouts, size, scene))
            found.append(Outlook(str(each), each.lanes > 0, noise_error(each), tuple(zip(*columns, strict=True))))
    return found


def picks(outlooks: Sequence[Outlook], scene: Scene, max_error: float = math.inf) -> list[list[Pick]]:
    """By link and number of ranks, as `advise` picks among the hooks with at most this error."""
    fit = [each for each in outlooks if each.hook == "exact" or (each.averages and each.error <= max_error)]
    places = [[(row, at) for at in range(len(scene.ranks))] for row in range(len(scene.links))]
    return [[_pick(fit, row, at) for row, at in line] for line in places]


def _pick(fit: Sequence[Outlook], row: int, at: int) -> Pick:
    times_s = {outlook.hook: outlook.predictions[row][at].step_s for outlook in fit}
    hook = worth_most(times_s, {outlook.hook: outlook.error for outlook in fit})
    return Pick(hook, times_s[hook], times_s["exact"] / times_s[hook])


def as_dict(outlooks: Sequence[Outlook], scene: Scene, limits: Sequence[float]) -> dict[str, Any]:
    """Plain values, for JSON; a limit without end is None there."""
    told = [
        {
            "max_error": limit if math.isfinite(limit) else None,
            "cells": [
                {"link": str(link), "ranks": ranks, **dataclasses.asdict(pick)}
                for link, row in zip(scene.links, picks(outlooks, scene, limit), strict=True)
                for ranks, pick in zip(scene.ranks, row, strict=True)
            ],
        }
        for limit in limits
    ]
    return {
        "scene": {**dataclasses.asdict(scene), "links": [str(link) for link in scene.links]},
        "hooks": [dataclasses.asdict(outlook) for outlook in outlooks],
        "picks": told,
    }


def blocks(params: int) -> list[Layout]:
    """Buckets of a transformer with about so many parameters, as wide as one of that size is. They take no memory."""
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


def _predict(each: Exchange, layouts: Sequence[Layout], size: int, scene: Scene) -> list[Prediction]:
    """On every link: it is rehearsed once."""
    courses = faster(rehearse(each, layouts, size), scene.codec_speed)
    backward_s = scene.compute_s * 2 / 3
    ready_s = tuple(backward_s * (index + 1) / len(layouts) for index in range(len(layouts)))
    forward_s = scene.compute_s - backward_s
    compute = Compute(forward_s=forward_s, ready_s=ready_s, backward_s=backward_s, cores=scene.cores)
    return [predict_step(courses, link, compute) for link in scene.links]


def faster(buckets: Sequence[Sequence[Course]], times: float) -> list[list[Course]]:
    """Courses on a core that is so many times as fast as the one they were rehearsed on."""
    return [[_faster(course, times) for course in courses] for courses in buckets]


def _faster(course: Course, times: float) -> Course:
    sends = tuple(dataclasses.replace(send, work_s=send.work_s / times) for send in course.sends)
    return Course(sends, course.work_s / times)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
