"""simulate(): step times of hooks on more ranks, and on other links, than there are here, by the cost model.

The model that is averaged is made of equal transformer blocks, a bucket each. A third of the compute is forward, the
rest backward, in which the blocks' buckets get ready at even distances. Chunks are rehearsed on one core of this
machine at the very number of ranks, so all that a hook does there is in its time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.advisor.cost import Compute, Prediction, predict_step
from gradwire.advisor.link import Link
from gradwire.advisor.rehearse import Course, Layout, rehearse
from gradwire.bucket import segments_of
from gradwire.errors import SpecError
from gradwire.exchanges import Exchange, exchange

MAX_RANKS = 4096
Report = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What to predict."""

    ranks: tuple[int, ...]
    link: Link
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
        if not 1000 <= self.params <= 10**12:
            raise SpecError(f"simulate: params must be between 1000 and 10^12, got {self.params}")
        for name in ("compute_s", "cores", "codec_speed"):
            if not 0 < getattr(self, name) < 1e9:
                raise SpecError(f"simulate: {name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Outlook:
    """One hook on every number of ranks."""

    hook: str
    averages: bool
    """Without, it is no more than the limit of what any hook can gain."""
    predictions: tuple[Prediction, ...]
    """In the order of `Scene.ranks`."""


def simulate(hooks: Sequence[str], scene: Scene, *, report: Report = lambda part, doing: None) -> list[Outlook]:
    """Predict every hook, in the order given."""
    exchanges = list(dict.fromkeys(exchange(hook) for hook in hooks))
    if not exchanges:
        raise SpecError("simulate: no hook to predict")
    layouts = blocks(scene.params)
    found = []
    with _one_thread():
        for index, each in enumerate(exchanges):
            report(index / len(exchanges), str(each))
            predictions = tuple(_predict(each, layouts, size, scene) for size in scene.ranks)
            found.append(Outlook(str(each), each.bound(2) is not None, predictions))
    return found


def fastest(outlooks: Sequence[Outlook], scene: Scene) -> dict[int, str]:
    """By number of ranks, the hook with the shortest step, of those that average."""
    able = [outlook for outlook in outlooks if outlook.averages]
    if not able:
        return {}
    best = (min(able, key=lambda outlook: outlook.predictions[at].step_s).hook for at in range(len(scene.ranks)))
    return dict(zip(scene.ranks, best, strict=True))


def as_dict(outlooks: Sequence[Outlook], scene: Scene) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "scene": {**dataclasses.asdict(scene), "link": str(scene.link)},
        "hooks": [dataclasses.asdict(outlook) for outlook in outlooks],
        "fastest": fastest(outlooks, scene),
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


def _predict(each: Exchange, layouts: Sequence[Layout], size: int, scene: Scene) -> Prediction:
    courses = rehearse(each, layouts, size)
    faster = [[_faster(course, scene.codec_speed) for course in bucket] for bucket in courses]
    forward_s = scene.compute_s / 3
    backward_s = scene.compute_s - forward_s
    ready_s = tuple(backward_s * (index + 1) / len(layouts) for index in range(len(layouts)))
    compute = Compute(forward_s=forward_s, ready_s=ready_s, backward_s=backward_s, cores=scene.cores)
    return predict_step(faster, scene.link, compute)


def _faster(course: Course, times: float) -> Course:
    sends = tuple(dataclasses.replace(send, work_s=send.work_s / times) for send in course.sends)
    return Course(sends, course.work_s / times)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
