"""Few bits per value, on a grid of levels: `gradwire.kernels.grid` says what is where."""

import torch
from torch import Tensor

from gradwire.kernels.grid import NONFINITE, PLANES, REACH, ZERO, Grid
from gradwire.kernels.torch.bits import float_of, magnitude_of, tree_sum, uniform
from gradwire.kernels.torch.hadamard import hadamard, inverse_hadamard


def encode_(wire: Tensor, values: Tensor, grid: Grid, seed: int = 0) -> Tensor:
    """Write the wire of `values`. `seed` is for stochastic rounding."""
    layout = grid.layout(values.numel())
    exponents, scales, codes = layout.planes(wire)
    padded = torch.nn.functional.pad(values.float(), (0, layout.padded - values.numel()))
    for first, rows, width in layout.parts():
        tiles = padded.narrow(0, first * grid.tile, rows * width).view(rows, width)
        exponent, scale, code = _encode_tiles(tiles, grid, seed, first * grid.tile, values.numel())
        exponents.narrow(0, first, rows).copy_(exponent)
        scales.narrow(0, first * 16, scale.numel()).copy_(scale.view(-1))
        packed = _pack(code, grid.bits)
        codes.narrow(0, layout.code_bytes(first * grid.tile), packed.numel()).copy_(packed.view(-1))
    return wire


def decode_(out: Tensor, wire: Tensor, grid: Grid, alpha: float, add: bool) -> Tensor:
    """`out = alpha * values`, or `out += alpha * values`."""
    layout = grid.layout(out.numel())
    exponents, scales, codes = layout.planes(wire)
    for first, rows, width in layout.parts():
        at, blocks = first * grid.tile, rows * width // grid.block
        packed = codes.narrow(0, layout.code_bytes(at), layout.code_bytes(rows * width)).view(rows, -1)
        exponent, scale = exponents.narrow(0, first, rows), scales.narrow(0, first * 16, blocks).view(rows, -1)
        values = _decode_tiles(exponent, scale, _unpack(packed, grid.bits, width), grid, alpha).view(-1)
        part = out.narrow(0, at, min(values.numel(), out.numel() - at))
        values = values.narrow(0, 0, part.numel())
        part.add_(values) if add else part.copy_(values)
    return out


def sum_(out: Tensor, wires: Tensor, grid: Grid, alpha: float) -> Tensor:
    """`out = alpha * (values of all wires)`, in the order of the wires."""
    for rank, wire in enumerate(wires):
        decode_(out, wire, grid, alpha, rank > 0)
    return out


def reduce_(wire: Tensor, own: Tensor, wires: Tensor, skip: int, grid: Grid, alpha: float, seed: int = 0) -> Tensor:
    """Encode `alpha * (own + values of all wires but one)`."""
    mean = own.float() * alpha
    for rank, other in enumerate(wires):
        if rank != skip:
            decode_(mean, other, grid, alpha, True)
    return encode_(wire, mean, grid, seed)


def _encode_tiles(x_RT: Tensor, grid: Grid, seed: int, at: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x_RT.shape[0]
    exponent = (magnitude_of(x_RT).amax(1, keepdim=True) >> 23).clamp(min=1)
    x_RT = x_RT.masked_fill(exponent == NONFINITE, 0.0)
    factor = float_of(torch.where(exponent < 254, (254 - exponent) << 23, 1 << 22))  # 2 ** (127 - exponent)
    if grid.hadamard:
        x_RT, factor = hadamard(x_RT * factor, grid.hadamard), torch.ones_like(factor)
    x_RBK, factor = x_RT.view(rows, -1, grid.block), factor.unsqueeze(2)

    there = _there(x_RBK, grid, at, end)
    scale_byte = _scale_byte(_wanted_scale(x_RBK, factor, there, grid), grid)
    inverse = (scale_of(scale_byte, grid).reciprocal() * factor).clamp(max=2.0**126)
    u_RBK = x_RBK * inverse
    if grid.widest:
        u_RBK = u_RBK.clamp(-REACH, REACH)
    codes = _stochastic(u_RBK, grid, seed, at) if grid.stochastic else _nearest(u_RBK, grid)
    if grid.fit:
        level = torch.where(there, levels_of(codes, grid).abs(), 0.0)
        fitted = tree_sum((x_RBK * factor).abs() * level) / tree_sum(level * level)
        scale_byte = _scale_byte(fitted, grid)
    codes = codes.masked_fill((exponent == NONFINITE).unsqueeze(2), 2 ** (grid.bits - 1))
    zeros = magnitude_of(x_RBK).amax(2, keepdim=True) == 0
    return exponent.view(-1), scale_byte.masked_fill(zeros, ZERO), codes.to(torch.uint8).view(rows, -1)


def _there(x_RBK: Tensor, grid: Grid, at: int, end: int) -> Tensor:
    """Which places hold values; the others pad the last block. A rotation spreads the values over all of them."""
    place = torch.arange(at, at + x_RBK.numel(), device=x_RBK.device).view_as(x_RBK)
    return (place < end) | bool(grid.hadamard)


def _wanted_scale(x_RBK: Tensor, factor: Tensor, there: Tensor, grid: Grid) -> Tensor:
    if grid.widest:
        a = x_RBK * factor
        share = there.sum(2, keepdim=True).clamp(min=1).double().reciprocal().float()
        return (tree_sum(a * a) * share).sqrt() * grid.widest
    largest = float_of(magnitude_of(x_RBK).amax(2, keepdim=True)) * factor
    return largest * (1.0 / grid.top) if grid.stochastic else largest


def _scale_byte(scale: Tensor, grid: Grid) -> Tensor:
    """Rounded to nearest; up where no value may lie beyond the last level."""
    rounding = (1 << 19) - 1 if grid.stochastic else 1 << 18
    return (grid.base - ((scale.view(torch.int32) + rounding) >> 19)).clamp(1, 254)


def scale_of(scale_byte: Tensor, grid: Grid) -> Tensor:
    """The scale in units of the tile's binade."""
    return float_of((grid.base - scale_byte.to(torch.int32)) << 19)


def _nearest(u_RBK: Tensor, grid: Grid) -> Tensor:
    """`floor(encoder(u))` on a grid 256 times finer than the levels; code 0 is the lowest level."""
    half = 2 ** (grid.bits - 1)
    fine = _polynomial(grid.encoder, u_RBK) + (49152.0 + half)  # 2**15 + 2**14: bits 8 and up are whole numbers
    return torch.bitwise_and(fine.view(torch.int32) >> 8, 2 * half - 1)


def _stochastic(u_RBK: Tensor, grid: Grid, seed: int, at: int) -> Tensor:
    """The level below or the one above, such that the expectation is `u`."""
    last = 2**grid.bits - 2
    below = (_polynomial(grid.encoder, u_RBK) + (last / 2 + 0.5)).floor().clamp(0, last)
    low, high = levels_of(below, grid), levels_of(below + 1, grid)
    below = (below - (u_RBK < low).float() + (u_RBK > high).float()).clamp(0, last)
    low, high = levels_of(below, grid), levels_of(below + 1, grid)
    chance = (u_RBK - low) / (high - low)
    drawn = uniform(u_RBK.numel(), at, seed, u_RBK.device).view_as(u_RBK)
    return torch.add(below, drawn < chance).to(torch.int32)


def levels_of(codes: Tensor, grid: Grid) -> Tensor:
    """The level of each code, in units of the scale."""
    return _polynomial(grid.decoder, codes.float() - (2 ** (grid.bits - 1) - 0.5))


def _decode_tiles(exponent: Tensor, scale_byte: Tensor, codes_RT: Tensor, grid: Grid, alpha: float) -> Tensor:
    rows, width = codes_RT.shape
    exponent = exponent.to(torch.int32).view(rows, 1)
    binade = float_of(exponent << 23).masked_fill(exponent == NONFINITE, float("nan"))
    scale = scale_of(scale_byte, grid).masked_fill(scale_byte == ZERO, 0.0)
    t = codes_RT.view(rows, -1, grid.block).float() - (2 ** (grid.bits - 1) - 0.5)
    last = binade * alpha
    if grid.hadamard:
        values = _scaled_polynomial(grid.decoder, t, scale.unsqueeze(2), torch.ones_like(last).unsqueeze(2))
        return inverse_hadamard(values.view(rows, width), grid.hadamard) * last
    return _scaled_polynomial(grid.decoder, t, scale.unsqueeze(2), last.unsqueeze(2)).view(rows, width)


def _polynomial(coefficients: tuple[float | Tensor, ...], x: Tensor) -> Tensor:
    c0, c1, c2, c3 = coefficients
    z = x * x
    return (((z * c3 + c2) * z + c1) * z + c0) * x


def _scaled_polynomial(coefficients: tuple[float, ...], x: Tensor, scale: Tensor, last: Tensor) -> Tensor:
    """Multiply by the scale first: scale times binade may exceed the range of a float where the value does not."""
    return _polynomial(tuple(scale * c * last for c in coefficients), x)


def _pack(codes_RT: Tensor, bits: int) -> Tensor:
    return torch.cat([pack(codes_RT >> low, width) for width, low in PLANES[bits]], dim=1)


def _unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    sizes = [width * plane // 8 for plane, _ in PLANES[bits]]
    parts = zip(packed.split(sizes, dim=1), PLANES[bits], strict=True)
    return sum(unpack(part, plane) << low for part, (plane, low) in parts)  # type: ignore[return-value]


def pack(codes_RT: Tensor, bits: int) -> Tensor:
    """The lowest `bits` of each code, 8 / bits codes per byte."""
    rows = codes_RT.shape[0]
    parts = (codes_RT & (2**bits - 1)).view(rows, 8 // bits, -1)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes_RT.device).view(1, -1, 1)
    return torch.sum(parts << shifts, 1, dtype=torch.uint8)


def unpack(plane: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device).view(1, -1, 1)
    return (plane.unsqueeze(1) >> shifts).bitwise_and(2**bits - 1).view(plane.shape[0], -1)
