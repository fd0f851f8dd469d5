"""The functions behind `gradwire probe`, `headroom`, `advise` and `simulate`: does compression pay?"""

from gradwire.tools.launch.link import EmulatedLink, Link, emulate
from gradwire.tools.measure.advise import advise
from gradwire.tools.measure.compute import Compute, measure_compute
from gradwire.tools.measure.cost import Prediction, predict, predict_step
from gradwire.tools.measure.headroom import headroom
from gradwire.tools.measure.probe import probe
from gradwire.tools.measure.rehearse import Send, Trace, rehearse
from gradwire.tools.measure.simulate import simulate

__all__ = [
    "Compute",
    "EmulatedLink",
    "Link",
    "Prediction",
    "Send",
    "Trace",
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
