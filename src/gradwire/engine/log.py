"""log(): a value of the training, such as the loss on held-out data, for whoever listens."""

from collections.abc import Callable

from torch import Tensor

Listener = Callable[[str, float], None]

listeners: list[Listener] = []
"""Called with every name and value. `gradwire compare` adds one in the processes that it starts."""


def log(name: str, value: float | Tensor) -> None:
    """Report a value of the training to `gradwire compare --metric NAME`. Anywhere else it does nothing.

    Args:
        name: What the value is, such as `"val_loss"`. Smaller values must be better.
        value: A number, or a tensor with one element. The mean over the ranks that log it counts.

    Examples:
        >>> gradwire.log("val_loss", evaluate(model))
    """
    for listener in listeners:
        listener(name, float(value))
