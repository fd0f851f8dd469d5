"""Few bits per value on the CPU: tile by tile, so that only the first pass over a tile goes to memory.

The kernels of a grid are made with all its numbers as constants: that lets LLVM unroll and vectorise every loop.
"""

import functools
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.grid import Grid
from gradwire.kernels.memory import rows_of
from gradwire.kernels.numba.bits import F32, U8, U32, U64, largest
from gradwire.kernels.numba.blocks import (
    NEAREST,
    UP,
    dithered,
    fitted_scales,
    mean_squares,
    nearest,
    polynomial,
    scale_byte,
    scale_of,
    terms_of,
)
from gradwire.kernels.numba.hadamard import rotate
from gradwire.kernels.numba.llvm import float_of, inline, jit
from gradwire.kernels.numba.planes import pack, unpack

_LAST = F32(2.0**126)


def encode_(wire: Tensor, values: Tensor, grid: Grid, seed: int = 0) -> Tensor:
    """See `gradwire.kernels.torch.levels`."""
    return reduce_(wire, values, wire.view(1, -1), 0, grid, 1.0, seed)


def decode_(out: Tensor, wire: Tensor, grid: Grid, alpha: float, add: bool) -> Tensor:
    """See `gradwire.kernels.torch.levels`."""
    return sum_(out, wire.view(1, -1), grid, alpha, add)


def sum_(out: Tensor, wires: Tensor, grid: Grid, alpha: float, add: bool = False) -> Tensor:
    """`out = alpha * values` of the first wire, `+= alpha * values` of every other, in one pass over `out`."""
    layout = grid.layout(out.numel())
    _kernels(grid)[1](out.numpy(), *rows_of(wires), layout.tiles, layout.blocks, F32(alpha), add)
    return out


def reduce_(wire: Tensor, own: Tensor, wires: Tensor, skip: int, grid: Grid, alpha: float, seed: int = 0) -> Tensor:
    """Encode `alpha * own`, `+= alpha * values` of every wire but one: no pass over memory for the sum."""
    layout = grid.layout(own.numel())
    sizes = layout.tiles, layout.blocks
    _kernels(grid)[0](wire.numpy(), own.numpy(), *rows_of(wires), skip, *sizes, F32(alpha), U32(seed & 0xFFFF_FFFF))
    return wire


@functools.cache
def _kernels(grid: Grid) -> tuple[Any, Any]:
    g = _constants(grid)
    bits, block, group, tile = grid.bits, grid.block, grid.hadamard, grid.tile

    @jit
    def reduce(wire, own, wires, stride, count, skip, tiles, blocks, alpha, seed):
        x, work, q, tops = _space(tile)
        y, inverses = np.empty(tile, np.float32), np.empty(16, np.float32)
        for t in range(tiles):
            width = min(tile, (blocks - 16 * t) * block)
            there = min(width, own.size - t * tile)
            if group or there < width or count > 1:
                _take(x, own, U64(t * tile), there, alpha)
                for r in range(count):
                    if r != skip:
                        unpack(q, wires, U64(r * stride) + _codes_at(t, tiles, blocks, g), width, bits)
                        _decode_tile(x, U64(0), width, wires, U64(r * stride), t, tiles, q, y, work, alpha, True, g)
                for i in range(there, width):
                    x[U64(i)] = F32(0.0)  # what the padding of the wires came to
                _encode_tile(wire, x, U64(0), width, there, t, tiles, blocks, x, work, q, tops, inverses, seed, g)
            else:
                _encode_tile(
                    wire, own, U64(t * tile), width, there, t, tiles, blocks, x, work, q, tops, inverses, seed, g
                )

    @jit
    def total(out, wires, stride, count, tiles, blocks, alpha, add):
        x, work, q, _ = _space(tile)
        for t in range(tiles):
            width = min(tile, (blocks - 16 * t) * block)
            there = min(width, out.size - t * tile)
            for r in range(count):
                unpack(q, wires, U64(r * stride) + _codes_at(t, tiles, blocks, g), width, bits)
                more = add or r > 0
                if group or there < width:
                    _decode_tile(x, U64(0), width, wires, U64(r * stride), t, tiles, q, x, work, alpha, False, g)
                    _put(out, U64(t * tile), x, there, more)
                else:
                    _decode_tile(
                        out, U64(t * tile), width, wires, U64(r * stride), t, tiles, q, x, work, alpha, more, g
                    )

    return reduce, total


def _constants(grid: Grid) -> tuple[Any, ...]:
    flags = int(grid.fit), int(grid.stochastic)
    scaling = F32(grid.widest), F32(1.0 / grid.top)
    coefficients = tuple(map(F32, grid.encoder)), tuple(map(F32, grid.decoder))
    return grid.bits, grid.block, grid.hadamard, grid.base, *flags, *scaling, *coefficients


@inline
def _space(tile: int) -> Any:
    """Work space for a tile's values (twice), its codes, and the largest magnitude of each block."""
    values = np.empty(tile, np.float32), np.empty(tile, np.float32)
    return values[0], values[1], np.empty(tile, np.uint8), np.empty(16, np.uint32)


@inline
def _codes_at(t: int, tiles: int, blocks: int, g: Any) -> Any:
    return U64(tiles + blocks + 2 * t * g[0] * g[1])


@inline
def _take(x: Any, v: Any, at: Any, there: int, alpha: Any) -> None:
    for i in range(there):
        x[U64(i)] = v[at + U64(i)] * alpha


@inline
def _put(out: Any, at: Any, x: Any, there: int, add: bool) -> None:
    for i in range(there):
        out[at + U64(i)] = (out[at + U64(i)] if add else F32(-0.0)) + x[U64(i)]


@inline
def _encode_tile(wire, v, at, width, there, t, tiles, blocks, x, work, q, tops, inverses, seed, g):
    """Encode a tile of `v`. Overwrites `x`, which is `v` where the tile is rotated."""
    bits, block, group, base, fit, stochastic, widest, inverse_top, encoder, decoder = g
    exponent = max(np.int64(_tops(tops, v, at, width, block) >> U32(23)), 1)
    wire[t] = exponent
    factor = float_of(U32(U32(254 - exponent) << U32(23)) if exponent < 254 else U32(1 << 22))  # 2 ** (127 - exponent)
    scales = U64(tiles + 16 * t)
    if exponent == 255:  # inf or NaN: the tile counts as lost
        for i in range(width):
            q[U64(i)] = U8(1 << (bits - 1))
        for j in range(width // block):
            wire[scales + U64(j)] = 255
        pack(wire, _codes_at(t, tiles, blocks, g), q, width, bits)
        return
    if group:
        for i in range(width):
            x[U64(i)] *= factor
        rotate(x, width, group, False)
        _tops(tops, x, U64(0), width, block)
        factor = F32(1.0)
    if widest > F32(0.0):
        mean_squares(inverses, v, at, width, there, block, group, factor, work)
    for j in range(width // block):  # apart from the next loop, so that the processor can work on several at once
        wanted = float_of(tops[j]) * factor
        if widest > F32(0.0):
            wanted = np.sqrt(inverses[j]) * widest
        elif stochastic:
            wanted = wanted * inverse_top
        byte = scale_byte(wanted, base, UP if stochastic else NEAREST)
        wire[scales + U64(j)] = 255 if tops[j] == U32(0) else byte
        inverse = F32(1.0) / scale_of(byte, base) * factor
        inverses[j] = inverse if inverse < _LAST else _LAST
    for j in range(width // block):
        begin, to = at + U64(j * block), U64(j * block)
        if stochastic:
            dithered(q, to, v, begin, block, inverses[j], bits, encoder, decoder, seed, t * 16 * block + j * block)
        else:
            nearest(q, to, v, begin, block, inverses[j], bits, encoder, widest > F32(0.0))
    if fit:
        fitted_scales(inverses, q, v, at, width, there, block, group, factor, work, bits, decoder)
        for j in range(width // block):
            if tops[j]:
                wire[scales + U64(j)] = scale_byte(inverses[j], base, NEAREST)
    pack(wire, _codes_at(t, tiles, blocks, g), q, width, bits)


@inline
def _tops(tops, v, at, width, block):
    """The largest bit pattern of each block, and of the tile."""
    top = U32(0)
    for j in range(width // block):
        tops[j] = largest(v, at + U64(j * block), block)
        top = max(top, tops[j])
    return top


@inline
def _decode_tile(out, at, width, wires, row, t, tiles, q, x, work, alpha, add, g):
    """`out = alpha * values of the codes in q`, or `+=`; a rotated tile goes by way of `x`."""
    bits, block, group, base, decoder = g[0], g[1], g[2], g[3], g[9]
    exponent = wires[row + U64(t)]
    binade = float_of(U32(U32(exponent) << U32(23))) if exponent != 255 else F32(np.nan)
    middle, terms = F32((1 << (bits - 1)) - 0.5), terms_of(decoder)
    m = F32(1.0) if group else binade * alpha
    if terms < 4 and not abs(m) < F32(np.inf):
        m = F32(np.nan)  # what the terms that are left out would come to
    for j in range(width // block):
        byte = np.int64(wires[row + U64(tiles + 16 * t + j)])
        s = F32(0.0) if byte == 255 else scale_of(byte, base)
        c = decoder[0] * s * m, decoder[1] * s * m, decoder[2] * s * m, decoder[3] * s * m
        to = U64(j * block)
        for k in range(block):
            i = to + U64(k)
            value = polynomial(F32(np.int32(q[i])) - middle, c, terms)
            if group:
                x[i] = value
            else:
                out[at + i] = out[at + i] + value if add else value
    if group:
        rotate(x, width, group, True)
        for k in range(width):
            value = x[U64(k)] * (binade * alpha)
            out[at + U64(k)] = out[at + U64(k)] + value if add else value
