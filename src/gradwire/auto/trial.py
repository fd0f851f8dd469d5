"""A trial: candidates take turns, until it is clear which is fastest.

In a round each takes a few steps, one after another's, so a slow moment of the machine hits neighbours alike: what
counts is a candidate's step against another's next to it. The largest and the smallest of these gaps are left out: one
of the two steps was disturbed, or had a short last batch. How much the others disagree says how far their mean is to
be trusted, and the trial goes on until it is, within limits. A long one costs little: those that are left in it are
nearly as fast as the fastest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

LEAST_ROUNDS, MOST_ROUNDS = 6, 48
NEAR, FAR, VERY_FAR = 1.03, 1.25, 2.5
"""As fast as the fastest; so much slower that two rounds are enough to tell, or one."""
SURE = 1.5
"""Standard errors."""
TRIMMED = 0.2
"""The part of the gaps that is left out at each end."""


class Trial:
    """What is known so far. Rounds are added until it `is_over`."""

    def __init__(self, errors: Mapping[str, float], *, survey: int | None = None) -> None:
        """`errors` are the candidates'; of those that are as fast, the most exact is picked.

        With `survey` nobody drops out, and it is over after so many rounds.
        """
        self.left = list(errors)
        """Who is still to take turns."""
        self.step_s: dict[str, list[float]] = {spec: [] for spec in errors}
        """All steps so far."""
        self.rounds = 0
        self._errors, self._survey = errors, survey

    def add(self, steps_s: Mapping[str, Sequence[float]]) -> None:
        """A round: the steps of each candidate that was left, as many for each. Those that are behind drop out."""
        for spec, times in steps_s.items():
            self.step_s[spec] += times
        self.rounds += 1
        if self._survey is None:
            self._drop()

    @property
    def is_over(self) -> bool:
        """One is left, or nobody left is likely to be faster than the most exact of them, or it is time."""
        if self._survey is not None:
            return self.rounds >= self._survey
        exact = min(self.left, key=self._errors.__getitem__)
        within = [gap + SURE * error <= math.log(NEAR) for gap, error in (self._gap(exact, spec) for spec in self.left)]
        return len(self.left) == 1 or self.rounds >= MOST_ROUNDS or (self.rounds >= LEAST_ROUNDS and all(within))

    @property
    def pick(self) -> str:
        """The most exact of the fastest."""
        leader = self._leader
        near = [spec for spec in self.left if self._gap(spec, leader)[0] <= math.log(NEAR)]
        return min(near, key=self._errors.__getitem__)

    @property
    def medians(self) -> dict[str, float]:
        """Seconds a step."""
        return {spec: statistics.median(times) for spec, times in self.step_s.items() if times}

    @property
    def times_s(self) -> dict[str, float]:
        """Seconds a step, had all taken all turns: the leader's median, and how far the others are behind it."""
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
        """How far behind, as a logarithm, over the rounds that both took part in; and the standard error of that."""
        pairs = zip(self.step_s[spec], self.step_s[other], strict=False)
        return trimmed_mean([math.log(mine / theirs) for mine, theirs in pairs])


def trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """Without the outermost fifth at each end; and its standard error, for which these count as the outermost left."""
    count, cut = len(values), int(TRIMMED * len(values))
    inner = sorted(values)[cut : count - cut]
    pulled_in = [min(max(value, inner[0]), inner[-1]) for value in values]
    deviation = statistics.stdev(pulled_in) if count > 1 else 0.0
    return statistics.fmean(inner), deviation * math.sqrt(count) / len(inner)
