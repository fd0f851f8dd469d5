"""Trains the codebooks in `gradwire/codecs/codebooks.py`, to the digit, from nothing but the normal distribution.

    python benchmarks/codebooks.py            # print the constants
    python benchmarks/codebooks.py --check    # compare them with the ones in the package

Gradients inside a block of 64 look normal, so their distribution over the block's scale is known in closed form: no
data set is needed, and the result is as good as one trained on real gradients (see `docs/methods.md`). A codebook is a
pair of odd polynomials. Lloyd's algorithm runs inside that family: the cells of the encoder give the decoder by least
squares, the midpoints of the decoder's levels give the encoder, and so on until nothing moves.
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np

from gradwire.codecs import codebooks
from gradwire.codecs.codebooks import REACH, Codebook

BLOCK, DIGITS = 64, 6
TERMS = 4
WIDEST = {1: 1.0, 2: 1.8, 3: 2.4, 4: 3.0, 5: 3.2}
"""For a scale of RMS: how many RMS the codebook reaches."""


def normal(x: np.ndarray) -> np.ndarray:
    """The density of the normal distribution."""
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def over_largest(u: np.ndarray) -> np.ndarray:
    """Squared-error weight of magnitude `u`, in units of its block's rounded largest value, for normal values."""
    weight = np.zeros_like(u)
    step = u[1] - u[0]
    tops = np.linspace(1.2, 6.0, 400)
    inside = np.array([math.erf(m / math.sqrt(2)) for m in tops])
    chance = 2 * BLOCK * inside ** (BLOCK - 1) * normal(tops)  # density of the largest magnitude
    for jitter in (np.arange(16) + 0.5) / 16 * (2 * REACH - 2) + (2 - REACH):  # largest value / rounded scale
        for top, share in zip(tops, chance, strict=True):
            scale = top / jitter
            others = np.where(u <= jitter, (BLOCK - 1) * 2 * normal(u * scale) * scale / inside_of(top), 0.0)
            weight += share * scale**2 * others
            weight[min(int(jitter / step), len(u) - 1)] += share * scale**2 / step
    return weight


def inside_of(top: float) -> float:
    """The chance that a normal value is below `top` in magnitude."""
    return math.erf(top / math.sqrt(2))


def over_rms(u: np.ndarray, widest: float) -> np.ndarray:
    """Weight of magnitude `u` in units of `widest` RMS."""
    return normal(u * widest) * widest


def train(bits: int, weight: np.ndarray, u: np.ndarray, rounds: int = 400) -> tuple[list[float], list[float]]:
    """Encoder and decoder polynomials with 2**(bits - 1) levels a side."""
    levels = 2 ** (bits - 1)
    middles = np.arange(levels) + 0.5
    powers = np.stack([middles ** (2 * i + 1) for i in range(min(TERMS, levels))], axis=1)
    crowd = np.cumsum(weight ** (1 / 3))  # many levels are best spread like this: a good start
    borders = np.interp(np.arange(1, levels) / levels, crowd / crowd[-1], u)
    for _ in range(rounds):
        cell = np.searchsorted(borders, u)
        mass = np.maximum(np.bincount(cell, weight, levels), 1e-12)
        centre = np.bincount(cell, weight * u, levels) / mass
        decoder = fit(powers, centre, np.sqrt(mass))
        values = powers @ decoder
        borders = (values[1:] + values[:-1]) / 2
    return encoder(borders, levels), list(decoder) + [0.0] * (TERMS - len(decoder))


def encoder(borders: np.ndarray, levels: int) -> list[float]:
    """An odd polynomial that is k at the k-th border, and below `levels` wherever a value can be."""
    if not len(borders):
        return [0.0] * TERMS
    terms = min(TERMS, len(borders))
    wanted = np.arange(1, levels)
    powers = np.stack([borders ** (2 * i + 1) for i in range(terms)], axis=1)
    found = fit(powers, wanted, 1 / np.sqrt(np.gradient(np.append(borders, REACH))[:-1] + 1e-3))
    return list(found) + [0.0] * (TERMS - terms)


def fit(powers: np.ndarray, wanted: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted least squares."""
    return np.linalg.lstsq(powers * weight[:, None], wanted * weight, rcond=None)[0]


def distortion(book: Codebook, weight: np.ndarray, u: np.ndarray) -> float:
    """Squared error over squared values."""
    levels = 2 ** (book.bits - 1)
    top = np.minimum(np.floor(polynomial(book.encoder, np.minimum(u, REACH))), levels - 1)
    return float((weight * (polynomial(book.decoder, top + 0.5) - u) ** 2).sum() / (weight * u * u).sum())


def polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    """Odd: x * (c0 + c1 x^2 + c2 x^4 + ...)."""
    return x * sum(c * x ** (2 * i) for i, c in enumerate(coefficients))


def trained() -> dict[tuple[str, int], Codebook]:
    """Every codebook of the package."""
    books = {}
    for kind, widths in (("trained", range(3, 7)), ("lloyd", range(1, 6))):
        for bits in widths:
            widest = WIDEST[bits] if kind == "lloyd" else 0.0
            u = (np.arange(8192) + 0.5) / 8192 * (7.0 / widest if widest else REACH)
            weight = over_rms(u, widest) if widest else over_largest(u)
            encode, decode = train(bits, weight, u)
            book = Codebook(bits, rounded(encode), rounded(decode), widest)
            books[kind, bits] = book
            print(f"    # {kind} {bits}: NMSE {distortion(book, weight, u):.5f}", file=sys.stderr)
    return books


def rounded(values: list[float]) -> tuple[float, ...]:
    """To so many significant digits that nobody sees the difference, and every machine prints the same."""
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)


def main() -> None:
    """Print or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the package's constants")
    args = parser.parse_args()
    books = trained()
    for (kind, bits), book in books.items():
        print(f'    ("{kind}", {bits}): {book},')
    if args.check and any(codebooks.TRAINED.get(key) != book for key, book in books.items()):
        sys.exit("the package's codebooks differ from these")


if __name__ == "__main__":
    main()
