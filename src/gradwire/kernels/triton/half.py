"""fp16 and bf16 in Triton."""

import torch
from torch import Tensor

from gradwire.kernels.torch import half as torch_half
from gradwire.kernels.triton import passes
from gradwire.kernels.triton.calls import TritonBatch, encode_one, reduce_one, total_one
from gradwire.kernels.triton.coding import BF16, FP16, PROGRAM_VALUES, in_halves
from gradwire.kernels.triton.launch import launch, or_torch

_BF16 = in_halves(BF16)


@or_torch(torch_half)
def half_scale(values: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.half`. One pass over the values, and one program for what it found."""
    programs = -(-values.numel() // PROGRAM_VALUES)
    largest = torch.empty(programs, dtype=torch.int32, device=values.device)
    numbers, coding = (values.numel(), 0, 0, 0, 1.0), in_halves(FP16)
    constants = {"C": coding, "TABLE": False, "KEEP": False, "ALIGN": 8, "WIRE_ALIGN": 4}
    launch(passes.tops, programs, (values, values, values, largest, values), *numbers, warps=coding.warps, **constants)
    scale = torch.empty(1, dtype=torch.float32, device=values.device)
    launch(passes.half_scale, 1, (scale, largest), programs, warps=1)
    return scale.view(())


@or_torch(torch_half)
def to_fp16_(out: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    return _scaled_(out, values.view(1, -1), factor.view(1), False)


@or_torch(torch_half)
def from_fp16_(out: Tensor, halves: Tensor, factor: Tensor, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    return _scaled_(out, halves.view(1, -1), factor.view(1), add)


@or_torch(torch_half)
def sum_fp16_(out: Tensor, wires: Tensor, factors: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.half`, which rounds to the type of `out` after each wire."""
    if out.dtype != torch.float32:
        return torch_half.sum_fp16_(out, wires, factors)
    return _scaled_(out, wires, factors, False)


@or_torch(torch_half)
def reduced_fp16_(out: Tensor, own: Tensor, wires: Tensor, skip: int, factors: Tensor, alpha: float) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    numbers = out.numel(), wires.stride(0), len(wires) - 1, skip, alpha
    _launch_scaled((out, own, wires, factors.contiguous()), numbers, add=False, own=True)
    return out


def _scaled_(out: Tensor, rows: Tensor, factors: Tensor, add: bool) -> Tensor:
    numbers = out.numel(), rows.stride(0), len(rows), len(rows), 0.0
    _launch_scaled((out, out, rows, factors.float().contiguous()), numbers, add=add, own=False)
    return out


def _launch_scaled(tensors: tuple[Tensor, ...], numbers: tuple[float, ...], *, add: bool, own: bool) -> None:
    programs, warps = -(-tensors[0].numel() // PROGRAM_VALUES), _BF16.warps
    launch(passes.scaled, programs, tensors, *numbers, warps=warps, ADD=add, OWN=own, SIZE=PROGRAM_VALUES)


@or_torch(torch_half)
def to_bf16_(out: Tensor, values: Tensor) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    encode_one(out.view(torch.uint8), values, _BF16)
    return out


@or_torch(torch_half)
def from_bf16_(out: Tensor, values: Tensor, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    total_one(out, values.view(torch.uint8).view(1, -1), _BF16, alpha, add)
    return out


@or_torch(torch_half)
def sum_bf16_(out: Tensor, wires: Tensor, alpha: float) -> Tensor:
    """See `gradwire.kernels.torch.half`, which rounds to the type of `out` after each wire."""
    if out.dtype != torch.float32:
        return torch_half.sum_bf16_(out, wires, alpha)
    total_one(out, wires.view(torch.uint8), _BF16, alpha)
    return out


@or_torch(torch_half)
def reduce_bf16_(wire: Tensor, own: Tensor, wires: Tensor, skip: int, alpha: float) -> Tensor:
    """See `gradwire.kernels.torch.half`."""
    reduce_one(wire.view(torch.uint8), own, wires.view(torch.uint8), skip, _BF16, alpha)
    return wire


def batch(wire_dtype: torch.dtype) -> TritonBatch:
    """All tensors of a message at once."""
    return TritonBatch(_BF16 if wire_dtype == torch.bfloat16 else in_halves(FP16))
