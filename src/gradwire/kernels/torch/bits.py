"""Floats as bit patterns, sums in a fixed order, and random numbers without state: the same bits on every device."""

import torch
from torch import Tensor


def magnitude_of(values: Tensor) -> Tensor:
    """The bit patterns of `|values|`, int32: they sort like the magnitudes, with inf and NaN on top."""
    return values.view(torch.int32) & 0x7FFF_FFFF


def float_of(patterns: Tensor) -> Tensor:
    """The floats with these bit patterns."""
    return patterns.to(torch.int32).view(torch.float32)


def tree_sum(values: Tensor) -> Tensor:
    """The sum over the last dimension (a power of two, which becomes 1), halves on halves."""
    while (width := values.shape[-1]) > 1:
        values = values.narrow(-1, 0, width // 2) + values.narrow(-1, width // 2, width // 2)
    return values


def uniform(numel: int, at: int, seed: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1) that depend on nothing but the seed and the positions at, at + 1, ..."""
    h = torch.arange(at, at + numel, dtype=torch.int64, device=device) * 0x9E37_79B1 + (seed & 0xFFFF_FFFF)
    h = h & 0xFFFF_FFFF
    h = ((h ^ (h >> 16)) * 0x85EB_CA6B) & 0xFFFF_FFFF
    h = ((h ^ (h >> 13)) * 0xC2B2_AE35) & 0xFFFF_FFFF
    h = h ^ (h >> 16)
    return (h >> 8).float() * 2.0**-24
