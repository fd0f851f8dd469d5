"""Codes of up to 6 bits <-> bit planes, on the CPU: contiguous streams, which vectorise."""

from typing import Any

from gradwire.kernels.numba.bits import U8, U64
from gradwire.kernels.numba.llvm import inline


@inline
def pack(planes: Any, at: Any, q: Any, width: int, bits: int) -> None:
    """`width` codes into their planes from `at` on, see `gradwire.kernels.grid`."""
    if bits >= 4:
        _pack4(planes, at, q, width // 2)
    if bits == 2 or bits == 3:
        _pack2(planes, at, q, width // 4, 0)
    if bits == 6:
        _pack2(planes, at + U64(width // 2), q, width // 4, 4)
    if bits == 5:
        _pack1(planes, at + U64(width // 2), q, width // 8, 4)
    if bits == 3:
        _pack1(planes, at + U64(width // 4), q, width // 8, 2)


@inline
def unpack(q: Any, planes: Any, at: Any, width: int, bits: int) -> None:
    """The inverse."""
    if bits >= 4:
        _unpack4(q, planes, at, width // 2)
    if bits == 2 or bits == 3:
        _unpack2(q, planes, at, width // 4, 0)
    if bits == 6:
        _unpack2(q, planes, at + U64(width // 2), width // 4, 4)
    if bits == 5:
        _unpack1(q, planes, at + U64(width // 2), width // 8, 4)
    if bits == 3:
        _unpack1(q, planes, at + U64(width // 4), width // 8, 2)


@inline
def _pack4(out: Any, at: Any, q: Any, n: int) -> None:
    for k in range(n):
        i = U64(k)
        out[at + i] = U8((q[i] & U8(15)) | U8(q[i + U64(n)] << U8(4)))


@inline
def _unpack4(q: Any, planes: Any, at: Any, n: int) -> None:
    for k in range(n):
        i = U64(k)
        byte = planes[at + i]
        q[i] = byte & U8(15)
        q[i + U64(n)] = byte >> U8(4)


@inline
def _pack2(out: Any, at: Any, q: Any, n: int, low: int) -> None:
    m, w = U8(1 << low), U8(2 << low)
    for k in range(n):
        i = U64(k)
        a, b, c, d = q[i], q[i + U64(n)], q[i + U64(2 * n)], q[i + U64(3 * n)]
        ab = U8(U8(_where(a, m, 1) | _where(a, w, 2)) | U8(_where(b, m, 4) | _where(b, w, 8)))
        cd = U8(U8(_where(c, m, 16) | _where(c, w, 32)) | U8(_where(d, m, 64) | _where(d, w, 128)))
        out[at + i] = U8(ab | cd)


@inline
def _unpack2(q: Any, planes: Any, at: Any, n: int, low: int) -> None:
    v, w = 1 << low, 2 << low
    for part in range(4):
        m, o, to = U8(1 << (2 * part)), U8(2 << (2 * part)), U64(part * n)
        for k in range(n):
            i = U64(k)
            code = U8(_where(planes[at + i], m, v) | _where(planes[at + i], o, w))
            q[to + i] = U8(q[to + i] | code) if low else code


@inline
def _pack1(out: Any, at: Any, q: Any, n: int, low: int) -> None:
    m = U8(1 << low)
    for k in range(n):
        i = U64(k)
        a = U8(_where(q[i], m, 1) | _where(q[i + U64(n)], m, 2))
        b = U8(_where(q[i + U64(2 * n)], m, 4) | _where(q[i + U64(3 * n)], m, 8))
        c = U8(_where(q[i + U64(4 * n)], m, 16) | _where(q[i + U64(5 * n)], m, 32))
        d = U8(_where(q[i + U64(6 * n)], m, 64) | _where(q[i + U64(7 * n)], m, 128))
        out[at + i] = U8(U8(a | b) | U8(c | d))


@inline
def _unpack1(q: Any, planes: Any, at: Any, n: int, low: int) -> None:
    for part in range(8):
        m, to = U8(1 << part), U64(part * n)
        for k in range(n):
            i = U64(k)
            q[to + i] = U8(q[to + i] | _where(planes[at + i], m, 1 << low))


@inline
def _where(byte: Any, mask: Any, value: int) -> Any:
    """Shifts by a variable do not vectorise on bytes; tests do."""
    return U8(value) if U8(byte & mask) else U8(0)
