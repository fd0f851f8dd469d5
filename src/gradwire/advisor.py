"""Does compression pay? The functions behind `gradwire probe`, `headroom`, `advise` and `simulate`."""

from gradwire.tools.launch.link import EmulatedLink, Link, emulate
from gradwire.tools.measure.advise import advise
from gradwire.tools.measure.compute import measure_compute
from gradwire.tools.measure.cost import Compute, Prediction, predict, predict_step
from gradwire.tools.measure.headroom import headroom
from gradwire.tools.measure.probe import probe
from gradwire.tools.measure.rehearse import Course, Send, rehearse
from gradwire.tools.measure.simulate import simulate

__all__ = [
    "Compute",
    "Course",
    "EmulatedLink",
    "Link",
    "Prediction",
    "Send",
    "advise",
    "emulate",
    "headroom",
    "measure_compute",
    "predict",
    "predict_step",
    "probe",
    "rehearse",
    "simulate",
]
