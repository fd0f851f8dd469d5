"""A trial: candidates take turns until it is clear which one is fastest.

In a round every candidate takes a few steps, alternating with the others, so that a slow moment of the machine affects
neighbouring steps alike. What counts is the logarithm of the ratio of two neighbouring steps, called a gap. The largest
and the smallest gaps are left out, as one of the two steps was disturbed or had a short last batch. The standard error
of the trimmed mean decides whether the trial goes on, within limits. A long trial costs little: the candidates that
remain in it are nearly as fast as the fastest.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

LEAST_ROUNDS, MOST_ROUNDS = 6, 48
NEAR, FAR, VERY_FAR = 1.03, 1.25, 2.5
"""Ratios to the fastest: counts as equally fast; slow enough to drop out after two rounds, or after one."""
SURE = 1.5
"""The number of standard errors that counts as certain."""
TRIMMED = 0.2
"""The fraction of the gaps that is left out at each end."""


class Trial:
    """The measurements so far. Rounds are added until it `is_over`."""

    def __init__(self, errors: Mapping[str, float], *, survey: int | None = None) -> None:
        """`errors` are the candidates' errors; among equally fast candidates the most exact is picked.

        With `survey` no candidate drops out, and the trial is over after that many rounds.
        """
        self.left = list(errors)
        """The candidates that still take turns."""
        self.step_s: dict[str, list[float]] = {spec: [] for spec in errors}
        """The times of all steps so far."""
        self.rounds = 0
        self._errors, self._survey = errors, survey

    def add(self, steps_s: Mapping[str, Sequence[float]]) -> None:
        """Add a round: equally many steps of every candidate that is left. Slow candidates drop out."""
        for spec, times in steps_s.items():
            self.step_s[spec] += times
        self.rounds += 1
        if self._survey is None:
            self._drop()

    @property
    def is_over(self) -> bool:
        """One candidate is left, or none is likely to be faster than the most exact one, or the limit is reached."""
        if self._survey is not None:
            return self.rounds >= self._survey
        exact = min(self.left, key=self._errors.__getitem__)
        within = [gap + SURE * error <= math.log(NEAR) for gap, error in (self._gap(exact, spec) for spec in self.left)]
        return len(self.left) == 1 or self.rounds >= MOST_ROUNDS or (self.rounds >= LEAST_ROUNDS and all(within))

    @property
    def pick(self) -> str:
        """The most exact of the fastest candidates."""
        leader = self._leader
        near = [spec for spec in self.left if self._gap(spec, leader)[0] <= math.log(NEAR)]
        return min(near, key=self._errors.__getitem__)

    @property
    def medians(self) -> dict[str, float]:
        """The median time per step, in seconds."""
        return {spec: statistics.median(times) for spec, times in self.step_s.items() if times}

    @property
    def times_s(self) -> dict[str, float]:
        """Seconds per step, as if all had taken all turns: the leader's median, times each candidate's ratio to it."""
        leader = self._leader
        base = statistics.median(self.step_s[leader])
        return {spec: base * math.exp(self._gap(spec, leader)[0]) for spec in self.step_s}

    @property
    def _leader(self) -> str:
        return min(self.left, key=lambda spec: self._gap(spec, self.left[0])[0])

    def _drop(self) -> None:
        limit = math.log(NEAR if self.rounds >= LEAST_ROUNDS else FAR if self.rounds > 1 else VERY_FAR)
        leader = self._leader
        gaps = {spec: self._gap(spec, leader) for spec in self.left}
        self.left = [spec for spec, (gap, error) in gaps.items() if gap - SURE * error <= limit]

    def _gap(self, spec: str, other: str) -> tuple[float, float]:
        """The mean gap over the rounds in which both took part, and its standard error."""
        pairs = zip(self.step_s[spec], self.step_s[other], strict=False)
        return trimmed_mean([math.log(mine / theirs) for mine, theirs in pairs])


def trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean without the outermost fifth at each end, and its standard error (from the winsorised deviation)."""
    count, cut = len(values), int(TRIMMED * len(values))
    inner = sorted(values)[cut : count - cut]
    pulled_in = [min(max(value, inner[0]), inner[-1]) for value in values]
    deviation = statistics.stdev(pulled_in) if count > 1 else 0.0
    return statistics.fmean(inner), deviation * math.sqrt(count) / len(inner)
