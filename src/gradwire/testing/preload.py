"""What the fork server of `gradwire.testing.processes` imports, so that no rank has to."""

import torch.distributed
import torch.nn.parallel

from gradwire import kernels
from gradwire.codecs.bf16 import BF16

__all__: list[str] = []

torch.compiler.reset()  # imports torch's compiler, as DDP does when it wraps a model
kernels.load()
BF16().encode(torch.ones(1))  # Numba imports half of itself when it compiles for the first time
