"""How sure a prediction is: from the spread of what it was made from, and the known error of the model.

Each input is made longer by its own uncertainty, one after the other, and the step is predicted again. The changes of
the step and the error of the model are independent, so that their squares add up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.tools.measure.cost import Wire

MODEL_ERROR = 0.10
"""The error of predictions, relative to measured steps: its root mean square was 7% on 8 ranks, and more on fewer ranks
beside other programs (benchmarks/results/predictions.md)."""

StepTime = Callable[[Wire, float], float]
"""Seconds of a step from a wire, and from a factor by which everything takes longer that the step computes."""


@dataclass(frozen=True, slots=True)
class Slower:
    """A wire on which everything takes `factor` times as long."""

    wire: Wire
    factor: float

    def cost_s(self, collective: str, size: int, sent_bytes: float) -> tuple[float, float]:
        """See `Wire`."""
        waiting_s, sending_s = self.wire.cost_s(collective, size, sent_bytes)
        return self.factor * waiting_s, self.factor * sending_s


def uncertainty(step_s: StepTime, wire: Wire, wire_spread: float, compute_spread: float) -> float:
    """How far a predicted step may be off, as a part of it.

    Args:
        step_s: Predicts the step.
        wire: What collectives cost.
        wire_spread: How far that may be off, as a part of it; 0 for a `Link`.
        compute_spread: How far the time that a step computes may be off, as a part of it.

    Returns:
        0.12 means that the step takes as long as predicted, +-12%: the standard deviation, so that a third of all steps
        lies outside.
    """
    expected_s = step_s(wire, 1.0)
    longer_s = step_s(Slower(wire, 1 + wire_spread), 1.0), step_s(wire, 1 + compute_spread)
    return math.hypot(MODEL_ERROR, *(each_s / expected_s - 1 for each_s in longer_s if expected_s > 0))
