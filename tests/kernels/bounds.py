"""Bytes that are no wire into every decoder, with bounds checks in the compiled kernels.

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=/tmp/bounds python -m tests.kernels.bounds 2000

A wire may be random, cut off or have a flipped bit. A decoder must refuse it with SpecError, or make of it what it
will: values, but no access out of bounds (IndexError) and no other error. Prints how many were tried.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

import torch
from torch import Tensor

from gradwire import SpecError, kernels
from gradwire.codecs import CODECS, Codec
from gradwire.exchanges.plan import Run, entries, plan, sum_part_
from gradwire.spec import build

SPECS = (*CODECS, "int4:hadamard=64")


def damaged(draw: random.Random, wire: Tensor) -> Tensor:
    """Random bytes, one flipped bit, or fewer or more bytes."""
    kind = draw.choice(("random", "flipped", "shorter", "longer"))
    wire = wire.clone()
    if kind == "random":
        return torch.randint(0, 256, wire.shape, dtype=torch.uint8, generator=seeded(draw))
    if kind == "flipped" and wire.numel():
        wire[draw.randrange(wire.numel())] ^= 1 << draw.randrange(8)
        return wire
    if kind == "longer":
        return torch.cat([wire, torch.full((draw.randint(1, 64),), 255, dtype=torch.uint8)])
    return wire[: draw.randint(0, wire.numel())]


def seeded(draw: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.getrandbits(40))


def decode(codec: Codec, wire: Tensor, numel: int) -> None:
    """Every way from a wire to values."""
    codec.decode(wire, numel)  # checks the length
    if numel == 0:
        return
    rows = torch.stack([wire, wire])
    codec.sum_(torch.empty(numel), rows, 0.5)
    codec.reduce_(torch.zeros_like(wire), torch.ones(numel), rows, 0, 0.5)
    whole = plan((Run(numel, False),), 1, codec)
    if whole.wire_bytes == wire.numel():
        flat, batch = torch.empty(numel), codec.batch(wire)
        if batch is None or not batch.total_(flat, entries(whole, ((0, 0),)), rows, 0.5, 2):
            sum_part_(codec, flat, whole.parts[0], rows, 0.5)


def main(count: int) -> Counter[str]:
    """Try `count` wires; how many were refused and how many were decoded."""
    draw, outcomes = random.Random(1), Counter[str]()
    for number in range(count):
        codec = build("codec", SPECS[number % len(SPECS)], CODECS)
        numel = draw.choice((0, 1, 7, 63, 64, 65, 255, 256, 257, draw.randint(1, 3000)))
        wire = damaged(draw, codec.encode(torch.randn(numel, generator=seeded(draw))))
        try:
            decode(codec, wire, numel)
            outcomes["decoded"] += 1
        except SpecError:
            outcomes["refused"] += 1
    return outcomes


def with_both(count: int) -> Counter[str]:
    """The same wires into the compiled kernels and into those of torch."""
    with kernels.reference():
        torchs = main(count)
    return torchs + main(count)


if __name__ == "__main__":
    from numba import config

    assert kernels.load() is not None
    assert config.BOUNDSCHECK == 1, "set NUMBA_BOUNDSCHECK=1"  # type: ignore[attr-defined]
    found = with_both(int(sys.argv[1]))
    print(f"{found.total()} wires with bounds checks: {found['refused']} refused, {found['decoded']} decoded")
