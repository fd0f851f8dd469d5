"""The Numba kernels and the torch kernels give the same bits."""

import importlib
import logging
import sys

import pytest
import torch

from gradwire import kernels

kernels.load()
CPU, TORCH = (importlib.import_module(f"gradwire.kernels.{way}.half") for way in ("cpu", "torch"))
SPECIAL = [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 65536.0, 6e-8, 2.9e-8, 3e-8, 3.4e38, -3.4e38, 1e-45, 1e-40]
NON_FINITE = [float("inf"), float("-inf"), float("nan")]


def values():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(5000, generator=generator) * scale for scale in (1, 1e-3, 1e-6, 1e3, 1e5, 1e-9, 1e37)]
    return torch.cat([*parts, torch.tensor(SPECIAL), torch.tensor(NON_FINITE)])


def same_bits(one, other):
    """Equal patterns; which of the many NaNs a NaN becomes is left open."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return bool(((one.view(kind) == other.view(kind)) | (one.isnan() & other.isnan())).all())


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


def test_says_once_that_numba_is_missing(monkeypatch, caplog):
    kernels.load.cache_clear()
    monkeypatch.setattr(kernels, "_cpu", None)
    monkeypatch.setitem(sys.modules, "gradwire.kernels.cpu", None)
    monkeypatch.delattr(kernels, "cpu", raising=False)
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert kernels.load() is None
        assert kernels.load() is None
    assert [record.getMessage().count("pip install 'gradwire[fast]'") for record in caplog.records] == [1]
    assert float(kernels.pick("half", torch.ones(1)).half_scale(torch.tensor([-3.0]))) == 2.0**-13
    kernels.load.cache_clear()
