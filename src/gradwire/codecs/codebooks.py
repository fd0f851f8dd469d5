"""Codebooks of int2 to int6: where the levels lie, as a pair of odd polynomials.

A value `u` in units of its block's scale gets the code `floor(encoder(u))`, counted from 0 in both directions, and
comes back as `decoder(code + 1/2)`. Polynomials of four terms come within 0.1% of the best table of levels, and
vector units evaluate them many times faster than they look up tables.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from gradwire.kernels.grid import REACH


class Codebook(NamedTuple):
    """2**bits levels, symmetric about 0."""

    bits: int
    encoder: tuple[float, ...]
    """Coefficients of u, u**3, u**5 and u**7."""
    decoder: tuple[float, ...]
    """Coefficients of t, t**3, t**5 and t**7."""
    widest: float
    """The scale in units of the block's RMS; 0: the scale is the block's largest magnitude."""


# Kind, bits, widest, encoder, decoder.
_TABLE = (
    ("trained", 3, 0.0, (5.38098, -2.45893, 0.959038, 0.0), (0.183645, 0.0028578, 4.58609e-05, 6.46791e-06)),
    ("trained", 4, 0.0, (10.8503, -5.03128, 2.73622, -1.02933), (0.091628, 0.000424754, -1.66286e-06, 9.44167e-08)),
    ("trained", 5, 0.0, (22.3158, -10.8785, 6.20946, -2.16904), (0.0445155, 5.72621e-05, -9.36082e-08, 7.85357e-10)),
    ("trained", 6, 0.0, (44.7578, -19.6928, 8.93073, -2.54731), (0.0221865, 6.79664e-06, -3.73708e-09, 6.55588e-12)),
    ("lloyd", 1, 1.0, (0.0, 0.0, 0.0, 0.0), (1.59577, 0.0, 0.0, 0.0)),
    ("lloyd", 2, 1.8, (1.83351, 0.0, 0.0, 0.0), (0.496143, 0.0281483, 0.0, 0.0)),
    ("lloyd", 3, 2.4, (4.84715, -1.55017, 0.319892, 0.0), (0.204316, 0.00266055, 4.66847e-05, 6.83977e-06)),
    ("lloyd", 4, 3.0, (11.5252, -5.32708, 1.62604, -0.19082), (0.0861149, 0.000407079, -4.64716e-06, 1.54403e-07)),
    ("lloyd", 5, 3.2, (23.4975, -10.8348, 2.107, 0.558851), (0.0417293, 7.80462e-05, -4.87497e-07, 2.42291e-09)),
)
TRAINED: Mapping[tuple[str, int], Codebook] = MappingProxyType(
    {(kind, bits): Codebook(bits, encoder, decoder, widest) for kind, bits, widest, encoder, decoder in _TABLE}
)
"""Made by `benchmarks/codebooks.py`; a test repeats that."""


def codebook(kind: str, bits: int) -> Codebook:
    """The codebook of a kind (`trained`, `lloyd` or `uniform`) and width."""
    if kind != "uniform":
        return TRAINED[kind, bits]
    levels = 2 ** (bits - 1)
    step = REACH / levels
    return Codebook(bits, (0.999 / step, 0.0, 0.0, 0.0), (step, 0.0, 0.0, 0.0), 0.0)
