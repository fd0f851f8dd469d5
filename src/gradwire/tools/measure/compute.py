"""Compute: what a training step takes without communication, and when each bucket is ready; and how to measure it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.engine.events import Moment, now, seconds
from gradwire.engine.hook import Hook
from gradwire.engine.observers import Observer
from gradwire.errors import SpecError
from gradwire.exchanges.bucket import Bucket
from gradwire.tools.measure.crowd import Crowd


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A step without communication."""

    forward_s: float
    ready_s: tuple[float, ...]
    """When each bucket is full, from the start of backward, in the order of the buckets."""
    backward_s: float
    after_s: float = 0.0
    """The optimizer, and whatever else comes after backward."""
    cores: float = 1.0
    """The cores that this rank has to itself."""
    threads: int = 1
    """The threads that backward computes with."""
    crowd: float = 1.0
    """How many times as long work takes because other ranks use the same cores. It is in the times above already."""

    def __post_init__(self) -> None:
        times = (self.forward_s, *self.ready_s, self.backward_s, self.after_s)
        if not all(0 <= value < math.inf for value in times) or list(self.ready_s) != sorted(self.ready_s):
            raise SpecError(f"compute: times must be 0 or more, and buckets get ready one after the other, got {self}")
        if self.cores <= 0 or self.threads < 1 or not 1 <= self.crowd < math.inf:
            raise SpecError(f"compute: a rank has more than 0 cores, at least 1 thread and a crowd of 1, got {self}")

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.after_s

    def slower(self, factor: float) -> Compute:
        """The same step, in which everything takes `factor` times as long."""
        times = {name: factor * getattr(self, name) for name in ("forward_s", "backward_s", "after_s")}
        return replace(self, ready_s=tuple(factor * value for value in self.ready_s), **times)


def measure_compute(
    hook: Hook, forward: Callable[[], Tensor], after: Callable[[], None] = lambda: None, *, steps: int = 5, cores: float
) -> Compute:
    """Measure what a step computes, without communication.

    Args:
        hook: A hook that is `noop` meanwhile, so that every rank trains by itself: use a model that can be thrown away.
        forward: Returns the loss.
        after: The optimizer's step.
        steps: The number of steps that medians are taken over.
        cores: The number of cores that this rank has to itself, or 1 if several ranks share one.

    Returns:
        The times of forward, of the backward pass up to each bucket, and of the rest.

    Examples:
        >>> hook = gradwire.register(model, "noop")
        >>> compute = gradwire.advisor.measure_compute(hook, lambda: loss(model(batch)), optimizer.step, cores=1)
    """
    if hook.exchange.lanes:
        raise SpecError(f"compute is measured under the hook 'noop', this one is {hook.exchange}; use hook.switch")
    arrived: list[Moment] = []
    hook.observers, kept = [_Arrivals(arrived, hook.device)], hook.observers
    crowd = Crowd()
    try:
        crowd.begin()
        taken = [_step(forward, after, arrived, hook.device) for _ in range(steps)]
        crowd.end()
    finally:
        hook.observers = kept
    forward_s, backward_s, after_s, *ready_s = (statistics.median(column) for column in zip(*taken, strict=True))
    return Compute(
        forward_s=forward_s,
        ready_s=tuple(min(value, backward_s) for value in ready_s),
        backward_s=backward_s,
        after_s=after_s,
        cores=cores,
        threads=min(torch.get_num_threads(), max(1, round(cores))),
        crowd=crowd.factor if hook.device.type == "cpu" else 1.0,
    )


class _Arrivals(Observer):
    """Notes when each bucket arrives."""

    def __init__(self, arrived: list[Moment], device: torch.device) -> None:
        self._arrived, self._device = arrived, device

    def after_mean(self, bucket: Bucket) -> None:
        """Under `noop` it is done as soon as it is there."""
        self._arrived.append(now(self._device))


def _step(
    forward: Callable[[], Tensor], after: Callable[[], None], arrived: list[Moment], device: torch.device
) -> Sequence[float]:
    """Seconds of forward, backward and after, and when each bucket arrived, from the start of backward."""
    arrived.clear()
    began = now(device)
    loss = forward()
    back = now(device)
    loss.backward()
    over = now(device)
    after()
    after_s = seconds(over, now(device))
    return seconds(began, back), seconds(back, over), after_s, *(seconds(back, came) for came in arrived)
