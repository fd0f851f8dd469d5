"""Measures the compute of a step: what it takes without communication, and when each bucket is full."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.engine.hook import Hook
from gradwire.errors import SpecError
from gradwire.tools.measure.cost import Compute


def measure_compute(
    hook: Hook, forward: Callable[[], Tensor], after: Callable[[], None] = lambda: None, *, steps: int = 5, cores: float
) -> Compute:
    """Medians over `steps` steps of `forward()` (which returns the loss), its backward and `after()` (the optimizer).

    The hook must be `noop` meanwhile, so every rank trains for itself: use a model that can be thrown away. `cores` are
    those that this rank has to itself.
    """
    if hook.exchange.lanes:
        raise SpecError(f"compute is measured under the hook 'noop', this one is {hook.exchange}; use hook.switch")
    arrived: list[float] = []
    hook.after_mean, kept = lambda bucket: arrived.append(time.perf_counter()), hook.after_mean
    try:
        taken = [_step(forward, after, arrived) for _ in range(steps)]
    finally:
        hook.after_mean = kept
    forward_s, backward_s, after_s, *ready_s = (statistics.median(column) for column in zip(*taken, strict=True))
    ready = tuple(min(value, backward_s) for value in ready_s)
    return Compute(
        forward_s=forward_s,
        ready_s=ready,
        backward_s=backward_s,
        after_s=after_s,
        cores=cores,
        threads=min(torch.get_num_threads(), max(1, round(cores))),
    )


def _step(forward: Callable[[], Tensor], after: Callable[[], None], arrived: list[float]) -> Sequence[float]:
    """Forward, backward, after, and the time at which each bucket came, from the start of backward."""
    arrived.clear()
    began = time.perf_counter()
    loss = forward()
    back = time.perf_counter()
    loss.backward()
    over = time.perf_counter()
    after()
    return back - began, over - back, time.perf_counter() - over, *(came - back for came in arrived)
