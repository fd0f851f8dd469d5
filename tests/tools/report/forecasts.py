"""Artificial predictions, of hooks with known errors."""

import math

from gradwire.advisor import Link, Prediction
from gradwire.tools.measure.simulate import Forecast, Scene

ERRORS = {"exact": 1e-8, "noop": 1.7, "bf16": 2e-3, "int8": 9e-3, "int4": 0.12, "sign": 0.7}
BITS = {"exact": 32, "noop": 0, "bf16": 16, "int8": 8.2, "int4": 4.2, "sign": 1.1}
WORK_S = {"exact": 0, "noop": 0, "bf16": 0.01, "int8": 0.03, "int4": 0.1, "sign": 0.2}
LIMITS = (0.02, math.inf)
SCENE = Scene(
    ranks=tuple(2**power for power in range(1, 11)), links=(Link(1e8), Link(1e9), Link(1e10), Link(1e11)), compute_s=0.1
)


def forecast(hook, steps):
    """From step times by link and ranks."""
    rest = {"sent_bytes": 0.0, "work_s": 0.0, "handling_s": 0.0, "wire_s": 0.0, "exposed_s": 0.0}
    rows = tuple(tuple(Prediction(step_s=step_s, **rest) for step_s in row) for row in steps)
    return Forecast(hook, hook != "noop", ERRORS[hook], rows)


def forecasts(scene=SCENE):
    """From a simple model: compute, transfer time, and work that grows with the ranks."""
    return [
        forecast(hook, [[_step_s(hook, link, ranks, scene) for ranks in scene.ranks] for link in scene.links])
        for hook in ERRORS
    ]


def _step_s(hook, link, ranks, scene):
    bits = BITS[hook] * scene.params * 2 * (ranks - 1) / ranks
    return scene.compute_s + bits / link.bits_per_s + WORK_S[hook] * (1 + ranks / 128)
