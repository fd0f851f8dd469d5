"""PowerSGD: a gradient matrix travels as two thin matrices."""

from gradwire.exchanges.low_rank.power_sgd import LowRank

__all__ = ["LowRank"]
