"""Every registered codec keeps every law; then what is special to one."""

import dataclasses

import pytest
import torch

from gradwire import kernels
from gradwire.codecs import BF16, CODECS, FP16, decode
from gradwire.errors import SpecError
from gradwire.testing.contracts import CODEC_CHECKS, gaussian

ALL = [pytest.param(make(), id=name) for name, make in CODECS.items()]


@pytest.fixture(params=["numba", "torch"], autouse=True)
def _kernels(request, monkeypatch):
    """Run everything on both sets of kernels."""
    monkeypatch.setattr(kernels, "_cpu", kernels.load() if request.param == "numba" else None)


@pytest.mark.parametrize("check", CODEC_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("codec", ALL)
def test_contract(codec, check):
    check(codec)


@pytest.mark.parametrize("codec", ALL)
def test_frozen_and_equal(codec):
    assert codec == type(codec)()
    assert dataclasses.is_dataclass(codec)
    assert type(codec).__dataclass_params__.frozen


@pytest.mark.parametrize("codec", ALL)
def test_wire_of_the_wrong_length_is_refused(codec):
    wire = codec.encode(gaussian(10))
    for wrong in (wire[:-1], torch.cat([wire, wire]), wire.float(), wire.view(1, -1)):
        with pytest.raises(SpecError, match=r"10 values is \d+ bytes"):
            decode(codec, wrong, 10)


def test_golden_wires():
    """The bytes on the wire are a contract between versions."""
    values = torch.tensor([1.0, -2.0, 0.5])
    scale, halves = [0, 0, 0, 57], [0, 112, 0, 244, 0, 108]  # 2**-13; 8192, -16384, 4096
    assert FP16().encode(values).tolist()[:10] == scale + halves
    assert BF16().encode(values).tolist()[:6] == [128, 63, 0, 192, 0, 63]


@pytest.mark.parametrize("scale", [1e-30, 2e-8, 1.0, 1e5, 3e38])
def test_fp16_neither_overflows_nor_underflows(scale):
    values = gaussian(1000).clamp(-1, 1) * scale
    error = (decode(FP16(), FP16().encode(values), 1000) - values).abs()
    assert float(error.max()) <= scale * 2**-11


def test_fp16_zero_dim_scale_is_a_power_of_two():
    wire = FP16().encode(gaussian(1000, scale=123.0))
    scale = float(wire[:4].view(torch.float32))
    assert scale == 2.0 ** round(torch.tensor(scale).log2().item())
