"""The products of PowerSGD on the CPU, with as few passes over the gradients as possible.

A row of a matrix is read from memory once, and stays in the first cache while each direction of the thin matrix goes
over it. That beats a general matrix product up to a rank of about MANY; beyond it, the torch kernels are used.
"""

import math

import numpy as np
from torch import Tensor

from gradwire.kernels.numba.bits import F32, U64
from gradwire.kernels.numba.llvm import jit, loose
from gradwire.kernels.torch import low_rank as products
from gradwire.kernels.torch.low_rank import DEPENDENT, Pair, Stack

MANY = 8
"""Up to this rank the loops here are faster than a library's product."""
F64 = np.float64


def project_(p_BRM: Tensor, flat: Tensor, residual: Tensor | None, stack: Stack, q_BRN: Tensor) -> None:
    """See `gradwire.kernels.torch.low_rank`."""
    if q_BRN.shape[1] > MANY:
        products.project_(p_BRM, flat, residual, stack, q_BRN)
        return
    a, feed = flat.numpy(), residual is not None
    _project(p_BRM.numpy(), a, a if residual is None else residual.numpy(), feed, stack, q_BRN.numpy())


def project_back_(q_BRN: Tensor, flat: Tensor, residual: Tensor | None, stack: Stack, p_BRM: Tensor) -> None:
    """See `gradwire.kernels.torch.low_rank`."""
    if q_BRN.shape[1] > MANY:
        products.project_back_(q_BRN, flat, residual, stack, p_BRM)
        return
    a, feed = flat.numpy(), residual is not None
    _project_back(q_BRN.numpy(), a, a if residual is None else residual.numpy(), feed, stack, p_BRM.numpy())


def rebuild_(flat: Tensor, residual: Tensor | None, stack: Stack, sent: Pair, mean: Pair, keep: Tensor) -> None:
    """See `gradwire.kernels.torch.low_rank`."""
    if mean[0].shape[1] > MANY:
        products.rebuild_(flat, residual, stack, sent, mean, keep)
        return
    p, q = mean[0].numpy(), mean[1].numpy()
    if residual is None or not keep:
        _rebuild(flat.numpy(), stack, p, q)
    else:
        _rebuild_keeping(flat.numpy(), residual.numpy(), stack, sent[0].numpy(), sent[1].numpy(), p, q)


def orthonormalize_(x_BRM: Tensor) -> None:
    """See `gradwire.kernels.torch.low_rank`."""
    _orthonormalize(x_BRM.numpy())


@loose
def _dot(a, at, q, b, k):
    total = F32(0.0)
    for j in range(q.shape[2]):
        total += a[at + U64(j)] * q[b, k, U64(j)]
    return total


@jit
def _project(p, a, e, feed, stack, q):
    for b in range(U64(q.shape[0])):
        for i in range(U64(p.shape[2])):
            at = U64(stack[0]) + b * U64(stack[1]) + i * U64(stack[4])
            if feed:
                for j in range(q.shape[2]):
                    a[at + U64(j)] += e[at + U64(j)]
            for k in range(U64(q.shape[1])):
                p[b, k, i] = _dot(a, at, q, b, k)


@loose
def _add_rows(q, b, k, a, at, cols, p, i):
    """Four rows at a time, so that `q` is written a quarter as often."""
    p0, p1, p2, p3 = p[b, k, i], p[b, k, i + U64(1)], p[b, k, i + U64(2)], p[b, k, i + U64(3)]
    at1, at2, at3 = at + cols, at + cols + cols, at + cols + cols + cols
    for j in range(q.shape[2]):
        n = U64(j)
        q[b, k, n] += p0 * a[at + n] + p1 * a[at1 + n] + p2 * a[at2 + n] + p3 * a[at3 + n]


@jit
def _project_back(q, a, e, feed, stack, p):
    rows, cols = U64(p.shape[2]), U64(q.shape[2])
    whole = rows - rows % U64(4)
    for b in range(U64(q.shape[0])):
        begin = U64(stack[0]) + b * U64(stack[1])
        for k in range(U64(q.shape[1])):
            for j in range(cols):
                q[b, k, j] = F32(0.0)
        for four in range(whole // U64(4)):
            i = four * U64(4)
            if feed:
                for j in range(begin + i * cols, begin + (i + U64(4)) * cols):
                    a[j] += e[j]
            for k in range(U64(q.shape[1])):
                _add_rows(q, b, k, a, begin + i * cols, cols, p, i)
        for i in range(whole, rows):
            if feed:
                for j in range(begin + i * cols, begin + (i + U64(1)) * cols):
                    a[j] += e[j]
            for k in range(U64(q.shape[1])):
                for j in range(cols):
                    q[b, k, j] += p[b, k, i] * a[begin + i * cols + j]


@jit
def _rebuild(a, stack, p, q):
    cols = U64(q.shape[2])
    for b in range(U64(q.shape[0])):
        for i in range(U64(p.shape[2])):
            at, first = U64(stack[0]) + b * U64(stack[1]) + i * cols, p[b, 0, i]
            for j in range(q.shape[2]):
                a[at + U64(j)] = first * q[b, 0, U64(j)]
            for k in range(U64(1), U64(q.shape[1])):
                weight = p[b, k, i]
                for j in range(q.shape[2]):
                    a[at + U64(j)] += weight * q[b, k, U64(j)]


@jit
def _rebuild_keeping(a, e, stack, sent_p, sent_q, p, q):
    cols = U64(q.shape[2])
    for b in range(U64(q.shape[0])):
        for i in range(U64(p.shape[2])):
            at, own, first = U64(stack[0]) + b * U64(stack[1]) + i * cols, sent_p[b, 0, i], p[b, 0, i]
            for j in range(q.shape[2]):
                n = at + U64(j)
                e[n] = a[n] - own * sent_q[b, 0, U64(j)]
                a[n] = first * q[b, 0, U64(j)]
            for k in range(U64(1), U64(q.shape[1])):
                own, weight = sent_p[b, k, i], p[b, k, i]
                for j in range(q.shape[2]):
                    n = at + U64(j)
                    e[n] -= own * sent_q[b, k, U64(j)]
                    a[n] += weight * q[b, k, U64(j)]


@loose
def _dot_rows(x, k, other):
    total = F64(0.0)
    for j in range(x.shape[1]):
        total += x[k, U64(j)] * x[other, U64(j)]
    return total


@jit
def _orthonormalize(rows_BRM):
    x = np.empty(rows_BRM.shape[1:], np.float64)
    for b in range(U64(rows_BRM.shape[0])):
        x[:] = rows_BRM[b]
        for k in range(U64(x.shape[0])):
            length = math.sqrt(_dot_rows(x, k, k))
            for _ in range(2):
                for other in range(k):
                    along = _dot_rows(x, k, other)
                    for j in range(x.shape[1]):
                        x[k, U64(j)] -= along * x[other, U64(j)]
            left = math.sqrt(_dot_rows(x, k, k))
            dependent = left <= DEPENDENT * length < math.inf
            for j in range(x.shape[1]):
                x[k, U64(j)] = F64(0.0) if dependent else x[k, U64(j)] / left
        rows_BRM[b] = x
