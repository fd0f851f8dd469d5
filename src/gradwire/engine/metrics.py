"""log(): a value of the training, such as the loss on held-out data, for whoever listens."""

from collections.abc import Callable

from torch import Tensor

Sink = Callable[[str, float], None]

sinks: list[Sink] = []
"""Called with every name and value. `gradwire compare` adds one in the processes that it starts."""


def log(name: str, value: float | Tensor) -> None:
    """Report a value of the training to `gradwire compare --metric NAME`. Anywhere else it does nothing.

    Args:
        name: What the value is, such as `"val_loss"`. Smaller values must be better.
        value: A number, or a tensor with one element. The mean over the ranks that log it counts.

    Example:
        >>> gradwire.log("val_loss", evaluate(model))
    """
    for sink in sinks:
        sink(name, float(value))
