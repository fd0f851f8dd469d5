"""Uses every kernel once: `python -m tests.kit.kernels` compiles them, and the server of the ranks imports this.

Numba keeps what it has compiled on disk. Tests that run at the same time and find nothing there would each compile
every kernel for themselves, on each of their ranks. Reading them takes time too: ranks inherit them from the server.
"""

import multiprocessing
from collections.abc import Sequence

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
RARE = (
    "int8:block=128",
    "int8:block=512",
    "int8:block=4096",
    "int5:codebook=lloyd",
    "int4:block=32",
    "int4:block=256",
    "int4:codebook=uniform",
    "int4:hadamard=256",
    "int3:codebook=lloyd",
    "int3:rounding=stochastic",
    "int2:block=8",
    "int2:hadamard=64",
    "int2:hadamard=256",
    "int2:rounding=stochastic",
    "fp8:block=32",
    "sign:block=8",
    "sign:block=64",
    "topk:block=8,ratio=0.5",
    "topk:ratio=0.1",
)
"""Other variants that tests of `make test` use. They are compiled too, but the server does not load them."""


def use(specs: Sequence[str]) -> None:
    """Use their kernels, which are read from disk or compiled."""
    for spec in specs:
        exchange(spec).warm_up(torch.device("cpu"))


def compile_all() -> None:
    """On two cores: one compiles the kernels of intN, which take half of the time, the other one the rest.

    Both write the variants of functions that they share, and one may overwrite those of the other: what is missing
    then is compiled at the end.
    """
    once = [spec for spec in (*SPECS, *RARE) if spec != "int4:allocate=true"]  # which uses the kernels of all others
    levels = [spec for spec in once if spec.startswith("int") and not spec.startswith("int8")]
    others = [spec for spec in once if spec not in levels]
    processes = [multiprocessing.get_context("fork").Process(target=use, args=(part,)) for part in (levels, others)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    use((*SPECS, *RARE))


kernels.load()
if __name__ == "__main__":
    compile_all()
else:
    use(SPECS)
