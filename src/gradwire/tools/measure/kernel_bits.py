"""Kernels against the torch kernels on the CPU, which are the reference: the same bits, and the speed beside a copy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.base import Codec
from gradwire.testing.contracts.codecs import gaussian, heavy_tailed, layered
from gradwire.tools.measure.probe import best_s

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMELS = (1, 31, 257, 4099)
ALPHA = 1 / 3
OTHER_VALUES, CUDA_VALUES = 1 << 20, 1 << 24


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """The times of a codec on a device, as multiples of a copy of the same float32 values."""

    encode_copies: float
    decode_copies: float
    copy_bytes_per_s: float
    """Bytes of values that a copy moves per second, each of which it reads and writes."""


def kernel_differences(codec: Codec, device: torch.device) -> list[str]:
    """What the kernels of `device` make of several inputs that differs from the reference; empty if nothing does."""
    texts = []
    for dtype in DTYPES:
        for kind, values in samples():
            text = _difference(codec, values.to(dtype), device)
            if text:
                texts.append(f"{text} of {values.numel()} {kind} {str(dtype).removeprefix('torch.')} values")
    return texts


def samples() -> Iterator[tuple[str, Tensor]]:
    """Inputs of every kind."""
    for numel in NUMELS:
        yield "normal", gaussian(numel, seed=numel)
    yield "heavy-tailed", heavy_tailed(2000)
    yield "layered", layered(2000)
    yield "zero", torch.zeros(300)
    yield "equal", torch.full((300,), -0.375)
    yield "tiny", gaussian(300, scale=1e-40)
    for bad in (math.inf, math.nan):
        values = gaussian(600)
        values[300] = bad
        yield f"normal and {bad}", values


def _difference(codec: Codec, values: Tensor, device: torch.device) -> str:
    """The first operation whose result differs; each one gets what the reference made before."""
    finite = bool(torch.isfinite(values).all())
    with kernels.reference():
        wires = torch.stack([codec.encode(values * factor) for factor in (1.0, -0.5, 2.0)])
        wanted = _results(codec, values, wires, finite=finite)
    got = _results(codec, values.to(device), wires.to(device), finite=finite)
    for name, result in got.items():
        if text := _unequal(result.cpu(), wanted[name]):
            return f"{name}: {text}"
    return ""


def _results(codec: Codec, values: Tensor, wires: Tensor, *, finite: bool) -> dict[str, Tensor]:
    """The result of each operation. Wires of inf and NaN are compared by their values: NaN has many bit patterns."""
    numel, place = values.numel(), values.device
    encoded, reduced = codec.encode(values), torch.empty_like(wires[0])
    codec.reduce_(reduced, values, wires, 1, ALPHA)
    base = torch.linspace(-1.0, 1.0, numel).to(place)
    return {
        "encode": encoded if finite else codec.decode(encoded, numel),
        "decode": codec.decode_(torch.empty_like(values), wires[0], alpha=-0.25),
        "decode and add": codec.decode_(base, wires[1], alpha=ALPHA, add=True),
        "sum": codec.sum_(torch.empty(numel, device=place), wires, ALPHA),
        "reduce": reduced if finite else codec.decode(reduced, numel),
    }


def _unequal(got: Tensor, wanted: Tensor) -> str:
    """Say where two results are not the same bits; empty if they are. Any NaN equals any other."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[wanted.element_size()]
    wrong = got.view(bits) != wanted.view(bits)
    if wanted.is_floating_point():
        wrong &= ~(got.isnan() & wanted.isnan())
    if not wrong.any():
        return ""
    at = int(wrong.to(torch.uint8).argmax())
    what = "values" if wanted.is_floating_point() else "bytes"
    return f"{int(wrong.sum())} of {wrong.numel()} {what} differ, {what[:-1]} {at} is {got[at]:g}, not {wanted[at]:g}"


def kernel_speed(codec: Codec, device: torch.device) -> KernelSpeed:
    """The fastest of some runs of encoding, decoding and copying on this rank, while others may be busy."""
    numel = CUDA_VALUES if device.type == "cuda" else OTHER_VALUES
    values = gaussian(numel).to(device)
    other, wire = torch.empty_like(values), codec.encode(values)
    copy_s = best_s(lambda: other.copy_(values), device)
    encode_s = best_s(lambda: codec.encode(values, out=wire), device)
    decode_s = best_s(lambda: codec.decode_(other, wire, alpha=0.5, add=True), device)
    return KernelSpeed(encode_s / copy_s, decode_s / copy_s, values.nbytes / copy_s)
