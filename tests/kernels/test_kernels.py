"""The Numba kernels and the torch kernels give the same bits."""

import importlib
import logging
import sys

import pytest
import torch

from gradwire import kernels
from gradwire.codecs import CODECS
from gradwire.spec import build

kernels.load()
CPU, TORCH = (importlib.import_module(f"gradwire.kernels.{way}.half") for way in ("numba", "torch"))
SPECIAL = [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 65536.0, 6e-8, 2.9e-8, 3e-8, 3.4e38, -3.4e38, 1e-45, 1e-40]
NON_FINITE = [float("inf"), float("-inf"), float("nan")]


def values():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(5000, generator=generator) * scale for scale in (1, 1e-3, 1e-6, 1e3, 1e5, 1e-9, 1e37)]
    return torch.cat([*parts, torch.tensor(SPECIAL), torch.tensor(NON_FINITE)])


def same_bits(one, other):
    """Equal patterns; which of the many NaNs a NaN becomes is left open."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return bool(((one.view(kind) == other.view(kind)) | (one.isnan() & other.isnan())).all())


def test_a_device_or_its_name():
    assert kernels.in_use("cpu") == kernels.in_use(torch.device("cpu")) == "numba"
    assert kernels.in_use("meta") == "torch"


@pytest.mark.parametrize("factor", [0.125, 1.0, 1024.0, 2.0**-30])
def test_fp16(factor):
    factor = torch.tensor(factor)
    halves = [way.to_fp16_(torch.empty(values().shape, dtype=torch.float16), values(), factor) for way in (CPU, TORCH)]
    assert same_bits(*halves)
    for add in (False, True):
        outs = [way.from_fp16_(values().clamp(-1, 1), halves[0], factor / 3, add) for way in (CPU, TORCH)]
        torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)


def test_every_half():
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    outs = [way.from_fp16_(torch.empty(65536), halves, torch.tensor(1.0), False) for way in (CPU, TORCH)]
    torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)
    finite = halves[torch.isfinite(halves)]
    back = CPU.to_fp16_(torch.empty_like(finite), finite.float(), torch.tensor(1.0))
    assert same_bits(back, finite)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 1 / 3, -1.0])
def test_bf16(alpha):
    wires = [way.to_bf16_(torch.empty(values().shape, dtype=torch.bfloat16), values()) for way in (CPU, TORCH)]
    assert same_bits(*wires)
    for add in (False, True):
        outs = [way.from_bf16_(values().clamp(-1, 1), wires[0], alpha, add) for way in (CPU, TORCH)]
        torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 1e-38, 1e-20, 1.0, 1.9999999, 2.0, 65504.0, 1e30, 3.4e38])
@pytest.mark.parametrize("numel", [1, 8, 9, 1000])
def test_half_scale(numel, scale):
    sample = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).clamp(-1, 1) * 0.5
    sample[numel // 2] = -1.0
    sample *= scale
    found = [float(way.half_scale(sample)) for way in (CPU, TORCH)]
    assert found[0] == found[1]
    if scale >= 1e-30:
        assert 2**14 <= scale / found[0] < 2**15
    for bad in NON_FINITE:
        sample[numel // 2] = bad
        assert float(CPU.half_scale(sample)) == float(TORCH.half_scale(sample)) == 1.0


def test_numba_without_its_compiler_is_not_used(monkeypatch, caplog):
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(kernels, "_numba", None)
    kernels.load.cache_clear()
    assert kernels.load() is None
    assert "NUMBA_DISABLE_JIT is set" in caplog.text
    kernels.load.cache_clear()


def test_missing_numba_is_logged_once(monkeypatch, caplog):
    kernels.load.cache_clear()
    monkeypatch.setattr(kernels, "_numba", None)
    monkeypatch.setitem(sys.modules, "gradwire.kernels.numba", None)
    monkeypatch.delattr(kernels, "numba", raising=False)
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert kernels.load() is None
        assert kernels.load() is None
    assert [record.getMessage().count("pip install numba") for record in caplog.records] == [1]
    assert float(kernels.pick("half", torch.ones(1)).half_scale(torch.tensor([-3.0]))) == 2.0**-13
    kernels.load.cache_clear()


# -- every codec: the two ways side by side --------------------------------------------------------------------------

VARIANTS = [
    *CODECS,
    *(f"{name}:hadamard={group}" for name in ("int4", "int2") for group in (64, 256)),
    "int4:block=32",
    "int4:block=256",
    "int5:codebook=lloyd",
    "int3:codebook=lloyd",
    "int4:codebook=uniform",
    *(f"{name}:rounding=stochastic,seed=8589934599" for name in ("int8", "int4", "int2")),
    "topk:ratio=0.1",
    "sign:block=64",
    "fp8:block=32",
]
SCALES = (1.0, 1e-42, 1e-20, 1e38)
LIMIT = 3.4e38


@pytest.fixture
def both(monkeypatch):
    """Call a function with the Numba kernels, then with those in torch."""

    def call(function):
        results = []
        for way in (kernels.load(), None):
            monkeypatch.setattr(kernels, "_numba", way)
            results.append(function())
        return results

    return call


def sizes_of(codec):
    block = getattr(codec, "block", 64)
    return 1, block - 1, block, block + 1, 16 * block, 16 * block + 1, 5000


def samples(numel):
    """Every kind of gradient that has a corner of its own, by name."""
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    found = {f"times {scale}": (normal * scale).clamp(-LIMIT, LIMIT) for scale in SCALES}
    found["many scales"] = normal * 10 ** torch.empty(numel).uniform_(-40, 35, generator=generator)
    found["runs of zeros"] = torch.where(torch.arange(numel) // 96 % 3 == 0, normal, 0.0)
    found["half empty"] = torch.where(torch.arange(numel) < numel // 2, 0.0, normal)
    found["-0"] = torch.full((numel,), -0.0)
    found["some -0"] = torch.where(normal < 0, -0.0, normal)
    found["equals"] = torch.full((numel,), -0.1)
    spike = {"spike": 3.0, "first": -3e38, "inf": torch.inf, "-inf": -torch.inf, "nan": torch.nan}
    for name, value in spike.items():
        found[name] = torch.zeros(numel) if name == "spike" else normal.clone()
        found[name][0 if name == "first" else numel // 3] = value
    return found


def fields(codec, wire, numel):
    """The wire without its padding, as the drawing on top of the codec's file cuts it."""
    if codec.name in ("fp16", "bf16"):
        at = 4 if codec.name == "fp16" else 0
        return wire[:at].view(torch.float32), wire[at : at + 2 * numel].view(codec.wire_dtype)
    if hasattr(codec, "grid"):
        layout = codec.grid.layout(numel)
        return (wire[: layout.tiles + layout.blocks + layout.code_bytes(layout.padded)],)
    blocks = -(-numel // codec.block)
    if codec.name == "topk":
        at = 2 * blocks * codec.kept
        return wire[:at], wire[at:].view(torch.bfloat16)
    scales = wire[wire.numel() - 4 * blocks :].view(torch.float32)
    codes = wire[: blocks * codec.block // (8 if codec.name == "sign" else 1)].view(blocks, -1)
    return torch.where(scales.isnan().view(-1, 1), 0, codes), scales  # a NaN has no sign that matters


def same_values(one, other):
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def same_wires(codec, wires, numel):
    pairs = zip(*(fields(codec, wire, numel) for wire in wires), strict=True)
    return all(same_bits(one, other) for one, other in pairs)


@pytest.mark.parametrize("spec", VARIANTS)
def test_same_wire_and_values(spec, both):
    codec = build("codec", spec, CODECS)
    for numel in sizes_of(codec):
        for what, sample in samples(numel).items():
            wires = both(lambda sample=sample: codec.encode(sample))
            assert same_wires(codec, wires, numel), (codec, numel, what)
            start = torch.linspace(-1, 1, numel)
            for alpha, add in ((1.0, False), (1 / 3, True)):
                outs = both(lambda w=wires[0], s=start, a=alpha, d=add: codec.decode_(s.clone(), w, alpha=a, add=d))
                assert same_values(*outs), (codec, numel, what, alpha, add)


@pytest.mark.parametrize("spec", VARIANTS)
def test_same_sums(spec, both):
    """Wires of three ranks that lie apart in memory, added up, and added up and encoded again."""
    codec = build("codec", spec, CODECS)
    for numel in sizes_of(codec):
        found, length = samples(numel), codec.wire_bytes(numel)
        for kinds in SUMS:
            table = torch.zeros((3, length + 8), dtype=torch.uint8)
            for row, kind in zip(table, kinds, strict=True):
                codec.encode(found[kind], out=row[4:-4])
            wires, own = table[:, 4:-4], found[kinds[0]].flip(0).contiguous()
            sums = both(lambda n=numel, w=wires: codec.sum_(torch.empty(n), w, 1 / 3))
            assert same_values(*sums), (codec, numel, kinds)
            for skip in (0, 2):
                outs = both(lambda o=own, w=wires, k=skip: reduced(codec, o, w, k))
                assert same_wires(codec, outs, numel), (codec, numel, kinds, skip)


SUMS = [
    ("times 1.0", "many scales", "runs of zeros"),
    ("times 1e-42", "times 1e-42", "-0"),
    ("times 1e+38", "times 1e+38", "first"),
    ("spike", "half empty", "times 1e-20"),
    ("times 1.0", "nan", "equals"),
    ("inf", "times 1.0", "-inf"),
]


def reduced(codec, own, wires, skip):
    wire = torch.zeros(wires.shape[1], dtype=torch.uint8)
    codec.reduce_(wire, own, wires, skip, 1 / 3)
    return wire


def test_whitening():
    ways = [importlib.import_module(f"gradwire.kernels.{way}.whiten") for way in ("numba", "torch")]
    moment, floor = values()[:-3].abs().clamp(max=1e30), torch.tensor(2.0**-20)
    for name in ("divide_", "multiply_"):
        numba, torch_ = (getattr(way, name)(values()[:-3], moment, floor) for way in ways)
        torch.testing.assert_close(numba, torch_, rtol=0, atol=0)
