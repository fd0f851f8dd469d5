"""The Hadamard rotation: spreads outliers over their group, so that all values look normal and equally large.

    groups of n:  butterflies at distances 8, 16, ..., n/2;  transpose every 8 x 8;  butterflies at 8, 16, 32

That is the usual transform with its coefficients in another order, chosen so that no butterfly is closer than 8.
"""

from __future__ import annotations

import math

from torch import Tensor, stack

NEAR = (8, 16, 32)


def hadamard(values: Tensor, group: int) -> Tensor:
    """Rotate each `group` (64, 128 or 256) of the last dimension; norms stay as they are."""
    values = _transposed(_butterflies(values, _far(group)))
    return _butterflies(values, NEAR) * norm(group)


def inverse_hadamard(values: Tensor, group: int) -> Tensor:
    """Rotate back."""
    values = _transposed(_butterflies(values, NEAR))
    return _butterflies(values, _far(group)) * norm(group)


def norm(group: int) -> float:
    """The factor that keeps norms."""
    return 1.0 / math.sqrt(group)


def _far(group: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(3, group.bit_length() - 1))


def _butterflies(values: Tensor, distances: tuple[int, ...]) -> Tensor:
    shape = values.shape
    for distance in distances:
        low, high = values.reshape(-1, 2, distance).unbind(1)
        values = stack((low + high, low - high), dim=1)
    return values.reshape(shape)


def _transposed(values: Tensor) -> Tensor:
    return values.reshape(-1, 8, 8).transpose(1, 2).reshape(values.shape)
