"""fit(): latency and bandwidth from times over sizes, as the line alpha + bytes / beta that fits best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.errors import SpecError


@dataclass(frozen=True, slots=True)
class Fit:
    """The time of a collective, as a function of the bytes that each rank sends."""

    alpha_s: float
    """The time of an empty collective."""
    bytes_per_s: float
    """The rate at which each rank sends beyond that."""
    r_squared: float
    """Goodness of the fit: 1 if all points lie on the line, 0 if it is no better than one time for all sizes."""
    spread: float = 0.0
    """How far the points lie from the line, as a part of their time: the root of the mean square."""

    def seconds(self, sent_bytes: float) -> float:
        """The time of a collective in which each rank sends this much."""
        return self.alpha_s + sent_bytes / self.bytes_per_s


def fit(sent_bytes: Sequence[float], times_s: Sequence[float]) -> Fit:
    """Fit by least squares, with weights under which the variance of a time grows in proportion to it.

    So small messages determine the latency and large ones the bandwidth. The latency is never negative, and more bytes
    never take less time. SpecError for fewer than two sizes.
    """
    if len(sent_bytes) != len(times_s) or len(set(sent_bytes)) < 2 or not all(time > 0 for time in times_s):
        raise SpecError(f"a fit needs times above 0 for at least two sizes, got {times_s} s for {sent_bytes}")
    weights = [1.0 / time for time in times_s]
    alpha, slope = _line(sent_bytes, times_s, weights)
    if alpha < 0:
        alpha, slope = 0.0, _through_zero(sent_bytes, times_s, weights)
    if slope <= 0:
        alpha, slope = _mean(times_s, weights), 0.0
    off = [(alpha + slope * sent) / time - 1 for sent, time in zip(sent_bytes, times_s, strict=True)]
    spread = math.hypot(*off) / math.sqrt(len(off))
    rate = 1.0 / slope if slope else math.inf
    return Fit(alpha, rate, _r_squared(sent_bytes, times_s, weights, alpha, slope), spread)


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
