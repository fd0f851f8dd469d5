"""Step 7: exchanges made of exchanges."""

from gradwire.policies.two_level import TwoLevel

__all__ = ["TwoLevel"]
