"""Uses every kernel once: `python -m tests.kit.kernels` compiles them, and the server of the ranks imports this.

Numba keeps what it has compiled on disk. Tests that run at the same time and find nothing there would each compile
every kernel for themselves, on each of their ranks. Reading them takes time too: ranks inherit them from the server.
"""

import torch

from gradwire import kernels
from gradwire.exchanges import EXCHANGES, exchange

SPECS = (
    *EXCHANGES,
    "int4:allocate=true",
    "int8:rounding=stochastic",
    "int4:rounding=stochastic",
    "int4:hadamard=64",
    "int2:whiten=true",
)

kernels.load()
for spec in SPECS:
    exchange(spec).warm_up(torch.device("cpu"))
