"""Which way to make the directions of PowerSGD orthonormal: time and worst case, on one thread.

    python benchmarks/orthonormal.py

Gram-Schmidt (ours: twice over, float64, in Numba and in torch), Householder QR (LAPACK, float32), CholeskyQR2 (float64,
two triangular solves). `off` is the largest entry of |X Xᵀ - I|, over the rows that are not zero, for well-conditioned
rows, for rows that differ by 1e-6 only, and for two equal rows; `fails` means an error, inf or NaN.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.numba import low_rank as numba
from gradwire.kernels.torch import low_rank as plain

REPEATS = 15


def householder_(x_BRM: Tensor) -> None:
    """LAPACK's QR of the transposed."""
    x_BRM.copy_(torch.linalg.qr(x_BRM.transpose(1, 2)).Q.transpose(1, 2))


def cholesky_(x_BRM: Tensor) -> None:
    """Two rounds of: divide by the Cholesky factor of the Gram matrix."""
    rows = x_BRM.double()
    for _ in range(2):
        factor = torch.linalg.cholesky(rows @ rows.transpose(1, 2))
        rows = torch.linalg.solve_triangular(factor, rows, upper=False)
    x_BRM.copy_(rows)


METHODS: dict[str, Callable[[Tensor], None]] = {
    "Gram-Schmidt, Numba": numba.orthonormalize_,
    "Gram-Schmidt, torch": plain.orthonormalize_,
    "Householder QR": householder_,
    "CholeskyQR2": cholesky_,
}


def microseconds(method: Callable[[Tensor], None], x_BRM: Tensor) -> float:
    """Median time for one stack."""
    times = []
    for _ in range(REPEATS):
        work = x_BRM.clone()
        began = time.perf_counter()
        method(work)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def off(method: Callable[[Tensor], None], x_RM: Tensor) -> str:
    """How far from orthonormal, or that it fails."""
    work = x_RM[None].clone()
    try:
        method(work)
    except RuntimeError:
        return "fails"
    rows = work[0].double()
    gram = rows @ rows.T
    error = (gram - torch.diag((gram.diagonal() > 0.5).double())).abs().max()
    return f"{error:.0e}" if torch.isfinite(error) else "fails"


def main() -> None:
    """The table."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 1, 1024), (8, 4, 1024), (1, 4, 4096), (1, 16, 4096), (1, 64, 4096)]
    stacks = [torch.randn(shape, generator=generator) for shape in shapes]
    normal = torch.randn(8, 1024, generator=generator)
    near = normal[:1] + 1e-6 * normal
    equal = normal[:1].expand(8, -1)
    head = "".join(f"{'x'.join(map(str, shape)):>12}" for shape in shapes)
    print(f"{'us for B x R x M':<22}{head}{'off: normal':>14}{'near':>8}{'equal':>8}")
    for name, method in METHODS.items():
        times = "".join(f"{microseconds(method, stack):>12.0f}" for stack in stacks)
        print(f"{name:<22}{times}{off(method, normal):>14}{off(method, near):>8}{off(method, equal):>8}")


if __name__ == "__main__":
    main()
