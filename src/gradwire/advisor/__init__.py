"""Does it pay? The link between the ranks, measured or emulated, and what a step costs under each hook."""

from __future__ import annotations

from gradwire.advisor.cost import Compute, Prediction, predict, predict_step
from gradwire.advisor.link import EmulatedLink, Link, emulate
from gradwire.advisor.rehearse import Course, Send, rehearse

__all__ = [
    "Compute",
    "Course",
    "EmulatedLink",
    "Link",
    "Prediction",
    "Send",
    "emulate",
    "predict",
    "predict_step",
    "rehearse",
]
