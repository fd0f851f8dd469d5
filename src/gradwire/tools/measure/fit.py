"""Times over sizes -> latency and bandwidth: the line alpha + bytes / beta that fits measured times best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.errors import SpecError


@dataclass(frozen=True, slots=True)
class Fit:
    """One collective between so many ranks."""

    alpha_s: float
    """What even an empty one takes."""
    bytes_per_s: float
    """Sent by each rank beyond that."""
    r_squared: float
    """Goodness of the fit: 1 is a line, 0 no better than one time for all sizes."""

    def seconds(self, sent_bytes: float) -> float:
        """What a collective takes in which each rank sends so much."""
        return self.alpha_s + sent_bytes / self.bytes_per_s


def fit(sent_bytes: Sequence[float], times_s: Sequence[float]) -> Fit:
    """Least squares, where a time of 2 s may be off by as much as two of 1 s: like a sum of many small delays.

    So small messages tell the latency and large ones the bandwidth. The latency is never below 0, and more bytes never
    take less time.
    """
    if len(sent_bytes) != len(times_s) or len(set(sent_bytes)) < 2 or not all(time > 0 for time in times_s):
        raise SpecError(f"a fit needs times above 0 for at least two sizes, got {times_s} s for {sent_bytes}")
    weights = [1.0 / time for time in times_s]
    alpha, slope = _line(sent_bytes, times_s, weights)
    if alpha < 0:
        alpha, slope = 0.0, _through_zero(sent_bytes, times_s, weights)
    if slope <= 0:
        alpha, slope = _mean(times_s, weights), 0.0
    return Fit(alpha, 1.0 / slope if slope else math.inf, _r_squared(sent_bytes, times_s, weights, alpha, slope))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def _line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    middle_x, middle_y = _mean(x, weights), _mean(y, weights)
    spread = _mean([(a - middle_x) ** 2 for a in x], weights)
    slope = _mean([(a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)], weights) / spread
    return middle_y - slope * middle_x, slope


def _through_zero(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> float:
    return _mean([a * b for a, b in zip(x, y, strict=True)], weights) / _mean([a * a for a in x], weights)


def _r_squared(x: Sequence[float], y: Sequence[float], weights: Sequence[float], alpha: float, slope: float) -> float:
    middle = _mean(y, weights)
    around_line = _mean([(b - alpha - slope * a) ** 2 for a, b in zip(x, y, strict=True)], weights)
    around_middle = _mean([(b - middle) ** 2 for b in y], weights)
    return 1.0 - around_line / around_middle if around_middle else 1.0
