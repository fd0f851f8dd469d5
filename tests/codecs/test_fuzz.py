"""Random codecs, options and gradients: what a codec promises holds, and both sets of kernels agree.

A case is made from its number and the seed below, so that a failure can be run again by its name. To look elsewhere:

    GRADWIRE_FUZZ_SEED=1234 pytest tests/codecs/test_fuzz.py
"""

import os
import random

import pytest
import torch

from gradwire import kernels
from gradwire.codecs import CODECS
from gradwire.spec import build
from tests.kernels.test_kernels import VARIANTS, both, same_values, same_wires  # noqa: F401

SEED = int(os.environ.get("GRADWIRE_FUZZ_SEED", "20"))
CASES = 150
COMPILED = [*VARIANTS, "int6:block=8", "int3:block=1024,hadamard=128", "int5:block=16,hadamard=256,rounding=stochastic"]
"""What both sets of kernels run. A grid takes Numba seconds to compile, so other options are for torch alone."""


def random_spec(rng):
    """A codec with options, and whether Numba's kernels take part."""
    if rng.random() < 0.7:
        return rng.choice(COMPILED), True
    name = rng.choice(["fp8", "int8", "int6", "int5", "int4", "int3", "int2", "sign", "topk"])
    options = {"block": 2 ** rng.randint(4, 12)}
    if name == "topk":
        options["ratio"] = rng.choice([1e-6, rng.random() or 1.0, 1.0])
    if name.startswith("int"):
        options |= {"rounding": rng.choice(["nearest", "stochastic"]), "seed": rng.randint(-(2**40), 2**40)}
    if name.startswith("int") and name != "int8":
        options["hadamard"] = rng.choice([0, 64, 128, 256])
        options["codebook"] = rng.choice(
            {"int6": ["trained", "uniform"], "int2": ["lloyd", "uniform"]}.get(name, KINDS)
        )
    return f"{name}:{','.join(f'{key}={value}' for key, value in options.items())}", False


KINDS = ["trained", "lloyd", "uniform"]


def random_values(rng, numel):
    """A mixture of scales, shapes, zeros and outliers within float32's normal range."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    values = torch.randn(numel, generator=generator) * 10 ** rng.uniform(-25, 30)
    if rng.random() < 0.3:
        values = values.sign() * values.abs().max()
    if rng.random() < 0.4:  # a scale for every run of values
        width = rng.choice([1, 7, 64, 1000])
        powers = torch.rand(-(-numel // width), generator=generator).mul(12).sub(6)
        values *= (10**powers).repeat_interleave(width)[:numel]
    if rng.random() < 0.3:
        values[torch.rand(numel, generator=generator) < rng.random()] = rng.choice([0.0, -0.0])
    if rng.random() < 0.3:
        begin = rng.randrange(numel)
        values[begin : begin + rng.randrange(1, 3000)] = 0.0
    if rng.random() < 0.2:
        values[rng.randrange(numel)] *= 1e4
    return values


def random_size(rng, codec):
    block = getattr(codec, "block", 64)
    edge = rng.choice([1, block, 16 * block, rng.randint(1, 20) * block])
    return max(1, min(rng.choice([edge - 1, edge, edge + 1, rng.randint(1, 8000)]), 70_000))


def sprinkled(rng, values):
    """The values with some inf and NaN among them, and their places."""
    places = sorted({rng.randrange(values.numel()) for _ in range(rng.choice([1, 1, 2, 10]))})
    values = values.clone()
    for place in places:
        values[place] = rng.choice([torch.inf, -torch.inf, torch.nan])
    return values, places


QUICK = 10


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.thorough if n >= QUICK else ()) for n in range(CASES)]
)
def test_promises_of_codecs_hold(case, both, monkeypatch):  # noqa: F811
    rng = random.Random(f"{SEED}/{case}")
    spec, compiled = random_spec(rng)
    codec = build("codec", spec, CODECS)
    values = random_values(rng, random_size(rng, codec))
    bad, places = sprinkled(rng, values)
    print(f"GRADWIRE_FUZZ_SEED={SEED} case {case}: {spec}, {values.numel()} values, not finite at {places}")
    if not compiled:
        monkeypatch.setattr(kernels, "_numba", None)
    for sample in (values, bad):
        wire = codec.encode(sample)
        codec.check_wire(wire, sample.numel())
        back = codec.decode(wire, sample.numel())
        check_values(codec, sample, back, places if sample is bad else [])
    if compiled:
        check_agreement(codec, values, bad, both, rng.choice([1.0, 0.5, 1 / 3, -1.0]))


def check_values(codec, sample, back, places):
    """Within the bound; or not finite where, and only near where, something was not finite."""
    if not places:
        error = float((back.double() - sample.double()).norm())
        assert error <= codec.bound * float(sample.double().norm()) * (1 + 1e-6)
        return
    lost = ~torch.isfinite(back)
    assert lost.any()
    assert codec.name == "topk" or lost[places].all()
    unit = codec.grid.tile if hasattr(codec, "grid") else getattr(codec, "block", 1)
    near = torch.isin(torch.arange(sample.numel()) // unit, torch.tensor(places) // unit)
    assert codec.name == "fp16" or not lost[~near].any()


def check_agreement(codec, values, bad, both, alpha):  # noqa: F811
    numel = values.numel()
    for sample in (values, bad):
        wires = both(lambda: codec.encode(sample))  # noqa: B023
        assert same_wires(codec, wires, numel)
    rows = torch.stack([codec.encode(values), codec.encode(values.flip(0).contiguous()), wires[0]])
    assert same_values(*both(lambda: codec.sum_(torch.empty(numel), rows, alpha)))
    assert same_wires(codec, both(lambda: reduced(codec, values, rows[:2], alpha)), numel)
    assert same_wires(codec, both(lambda: reduced(codec, values, rows, alpha)), numel)


def reduced(codec, own, wires, alpha):
    wire = torch.zeros(wires.shape[1], dtype=torch.uint8)
    codec.reduce_(wire, own, wires, 0, alpha)
    return wire
