"""A trial: candidates take turns of a few steps, until it is clear which is fastest.

Turns follow one another within seconds, so a slow minute of the machine hits all candidates alike: what counts is a
candidate's turn against the leader's turn of the same round. A turn counts for its fastest step, as what disturbs a
step only makes it slower. How much the rounds disagree says how far the outcome is to be trusted, and the trial goes
on until it is, within limits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

LEAST_ROUNDS, MOST_ROUNDS = 4, 16
NEAR, FAR = 1.03, 1.25
"""As fast as the fastest; out after a turn."""


class Trial:
    """What is known so far. Rounds are added until it `is_over`."""

    def __init__(self, errors: Mapping[str, float], *, everyone: bool = False) -> None:
        """`errors` are the candidates'; of those that are as fast, the most exact is picked.

        With `everyone` nobody drops out, and it is over after `LEAST_ROUNDS`.
        """
        self.left = list(errors)
        """Who is still to take turns."""
        self.step_s: dict[str, list[float]] = {spec: [] for spec in errors}
        """Of all steps, for those who want to show them."""
        self._errors, self._everyone = errors, everyone
        self._best: dict[str, list[float]] = {spec: [] for spec in errors}
        """The logarithm of each turn's fastest step."""

    def add(self, steps_s: Mapping[str, Sequence[float]]) -> None:
        """A round: the steps of each candidate that was left. Those that are behind drop out."""
        for spec, times in steps_s.items():
            self.step_s[spec] += times
            self._best[spec].append(math.log(min(times)))
        if not self._everyone:
            self._drop()

    @property
    def is_over(self) -> bool:
        """One is left, or the most exact of those left is as fast as the fastest, or it is time."""
        if len(self.left) == 1 or self._rounds >= MOST_ROUNDS:
            return True
        gap, error = self._behind(min(self.left, key=self._rank))
        return self._rounds >= LEAST_ROUNDS and (self._everyone or gap + error <= math.log(NEAR))

    @property
    def pick(self) -> str:
        """The most exact of the fastest."""
        return min((spec for spec in self.left if self._behind(spec)[0] <= math.log(NEAR)), key=self._rank)

    @property
    def medians(self) -> dict[str, float]:
        """Seconds a step."""
        return {spec: statistics.median(times) for spec, times in self.step_s.items() if times}

    @property
    def times_s(self) -> dict[str, float]:
        """Seconds a step, had all taken all turns: the leader's median, and how far the others are behind it."""
        base = statistics.median(self.step_s[self._leader])
        return {spec: base * math.exp(self._behind(spec)[0]) for spec in self._best}

    def _drop(self) -> None:
        fastest = min(min(self._best[spec]) for spec in self.left)
        self.left = [spec for spec in self.left if min(self._best[spec]) <= fastest + math.log(FAR)]
        if self._rounds >= LEAST_ROUNDS:
            leader = self._leader  # who leads does not drop out
            self.left = [spec for spec in self.left if spec == leader or self._may_be_near(spec)]

    @property
    def _rounds(self) -> int:
        return max(map(len, self._best.values()))

    @property
    def _leader(self) -> str:
        return min(self.left, key=lambda spec: statistics.fmean(self._best[spec]))

    def _rank(self, spec: str) -> tuple[float, float]:
        return self._errors[spec], statistics.fmean(self._best[spec])

    def _behind(self, spec: str) -> tuple[float, float]:
        """By how much, as a logarithm, over the rounds that it took part in; and the standard error of that."""
        pairs = zip(self._best[spec], self._best[self._leader], strict=False)
        gaps = [mine - leaders for mine, leaders in pairs]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        return statistics.fmean(gaps), error

    def _may_be_near(self, spec: str) -> bool:
        gap, error = self._behind(spec)
        return gap - error <= math.log(NEAR)
