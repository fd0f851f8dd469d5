"""The Hadamard rotation: spreads outliers over their group, so that all values look normal and equally large.

    every 8 x 8:  butterflies at distances 8, 16, 32;  transpose;  the same butterflies;  then at 64 and 128

That is the usual transform with its coefficients in another order, chosen so that no butterfly is closer than 8.
"""

import math

from torch import Tensor, stack

NEAR, FAR = (8, 16, 32), (64, 128)


def hadamard(values: Tensor, group: int) -> Tensor:
    """Rotate each `group` (64, 128 or 256) of the last dimension; norms stay as they are."""
    return _butterflies(_squares(values), _far(group)) * norm(group)


def inverse_hadamard(values: Tensor, group: int) -> Tensor:
    """Rotate back."""
    return _squares(_butterflies(values, _far(group))) * norm(group)


def _squares(values: Tensor) -> Tensor:
    return _butterflies(_transposed(_butterflies(values, NEAR)), NEAR)


def norm(group: int) -> float:
    """The factor that keeps norms."""
    return 1.0 / math.sqrt(group)


def _far(group: int) -> tuple[int, ...]:
    return tuple(distance for distance in FAR if distance < group)


def _butterflies(values: Tensor, distances: tuple[int, ...]) -> Tensor:
    shape = values.shape
    for distance in distances:
        low, high = values.reshape(-1, 2, distance).unbind(1)
        values = stack((low + high, low - high), dim=1)
    return values.reshape(shape)


def _transposed(values: Tensor) -> Tensor:
    return values.reshape(-1, 8, 8).transpose(1, 2).reshape(values.shape)
