"""The statistics of `gradwire compare`, as functions of numbers alone.

Runs with the same seed see the same batches from the same start, so most of what differs between seeds cancels in the
difference of two runs: the *gap*, hook minus reference, one number per seed. The mean gap has a confidence interval
from Student's t distribution. The *visible gap* is the smallest true gap that runs with this spread show as harm in
nine of ten such comparisons.
"""

from __future__ import annotations

import bisect
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
POWER = 0.9
"""A true gap counts as visible if this part of all comparisons would find it."""


# -- Student's t distribution ------------------------------------------------------------------------------------------


def t_cdf(t: float, df: float) -> float:
    """The probability of a value up to `t`, with `df` degrees of freedom; the normal distribution for infinite df."""
    if math.isinf(df):
        return statistics.NormalDist().cdf(t)
    if math.isinf(t):
        return float(t > 0)
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


@functools.cache
def t_quantile(p: float, df: float) -> float:
    """The inverse of `t_cdf`."""
    return _solve(lambda t: t_cdf(t, df) - p, -1e4, 1e4)


@functools.cache
def visible_shift(df: float, confidence: float = CONFIDENCE, power: float = POWER) -> float:
    """How many standard errors a true mean must be above 0 to be found with this probability.

    It is found if the lower end of the two-sided interval is above 0. The standard error is estimated, with `df`.
    """
    limit = t_quantile(0.5 + confidence / 2, df)
    return _solve(lambda shift: _found(shift, limit, df) - power, 0.0, 1e3)


def _found(shift: float, limit: float, df: float) -> float:
    """The probability that a noncentral t variable exceeds `limit`."""
    cdf = statistics.NormalDist().cdf
    if math.isinf(df):
        return cdf(shift - limit)
    return sum(weight * cdf(shift - limit * ratio) for ratio, weight in _error_ratios(df))


@functools.cache
def _error_ratios(df: float, count: int = 200) -> tuple[tuple[float, float], ...]:
    """Values of the estimated by the true error, which is sqrt(chi2 / df), with their probabilities."""
    ratios = [6 * (at + 0.5) / count for at in range(count)]
    logs = [(df - 1) * math.log(ratio) - df * ratio * ratio / 2 for ratio in ratios]
    weights = [math.exp(value - max(logs)) for value in logs]
    return tuple((ratio, weight / sum(weights)) for ratio, weight in zip(ratios, weights, strict=True))


def _solve(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0, by bisection."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    return front * _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Lentz's method."""
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / _nonzero(1 + term * d), _nonzero(1 + term / c)
            result *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return result


def _nonzero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


# -- gaps --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """By how much a hook's final loss is above that of the reference."""

    by_seed: Mapping[int, float]
    """Hook minus reference, by seed."""
    mean: float
    half_width: float
    """The 95% interval is `mean` plus and minus this; infinite for one seed."""
    visible: float
    """The smallest true gap that such runs show; infinite for one seed."""
    df: float
    """Degrees of freedom behind the interval."""

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half_width


def gap_of(by_seed: Mapping[int, float]) -> Gap:
    """The mean gap with its interval, from hook minus reference by seed.

    The spread is that of this hook alone. A spread pooled over all hooks would give narrower intervals, but hooks
    differ in it: if one has three times the spread of the others, its pooled 95% interval holds the true gap in only
    83 to 86% of all comparisons of 3 seeds, and the answer about a hook would depend on the company it is in.
    """
    values = list(by_seed.values())
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Gap(by_seed=dict(by_seed), mean=mean, half_width=math.inf, visible=math.inf, df=0)
    spread, df = statistics.stdev(values), count - 1
    error = spread / math.sqrt(count)
    return Gap(
        by_seed=dict(by_seed),
        mean=mean,
        half_width=t_quantile(0.5 + CONFIDENCE / 2, df) * error,
        visible=visible_shift(df) * error,
        df=df,
    )


def seeds_needed(gap: Gap, wanted: float, most: int = 50) -> int | None:
    """How many seeds with this spread would show a gap of `wanted`; None if more than `most`."""
    spread = statistics.stdev(gap.by_seed.values())
    counts = range(len(gap.by_seed) + 1, most + 1)
    at = bisect.bisect_left(counts, True, key=lambda n: visible_shift(n - 1) * spread / math.sqrt(n) <= wanted)
    return counts[at] if at < len(counts) else None


def final(losses: Sequence[float], window: int) -> float:
    """The mean over the last `window` values."""
    return statistics.fmean(losses[-window:])


def window_of(steps: int) -> int:
    """How many steps count as the end of a training: the last tenth, and at least 10."""
    return min(steps, max(10, round(steps / 10)))


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """By step, the mean over the last `window` values up to there. The first ones are means over fewer values."""
    total, result = 0.0, []
    for at, loss in enumerate(losses):
        total += loss - (losses[at - window] if at >= window else 0.0)
        result.append(total / min(at + 1, window))
    return result
