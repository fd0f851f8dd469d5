"""auto: chooses the hook that is fastest for this model on this network, while the model trains."""

from gradwire.auto.settings import Auto, auto

__all__ = ["Auto", "auto"]
