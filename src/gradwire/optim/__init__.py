"""What happens to an averaged gradient, and training that averages parameters instead of gradients."""

from gradwire.optim.averaging import HierarchicalModelAverager, PeriodicModelAverager, PostLocalSGDOptimizer
from gradwire.optim.in_backward import StepInBackward, step_in_backward
from gradwire.optim.local_sgd import DiLoCo, LocalSGD
from gradwire.optim.members import Shrink
from gradwire.optim.one_bit import OneBitAdamW
from gradwire.optim.synchronous import Synchronous

__all__ = [
    "DiLoCo",
    "HierarchicalModelAverager",
    "LocalSGD",
    "OneBitAdamW",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "Shrink",
    "StepInBackward",
    "Synchronous",
    "step_in_backward",
]
