"""Workers of ranks that do not live to tell: they have processes of their own, and leave what they saw in files."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.exchanges.base import Comm

from . import models
from .failures import Failing
from .models import batch, seeded
from .runner import world_on_a_socket
from .trial import raised, train

EXIT_CODE = 3


class Dying(Failing):
    """Ends its process in the middle of a job, without a word."""

    def fail(self, comm: Comm) -> None:
        os._exit(EXIT_CODE)


def lose_a_rank(rank: int, size: int, folder: str, guilty: int) -> None:
    """Rank `guilty` dies in its third job. With 0 the store dies too, as rank 0 serves it on a socket."""
    world_on_a_socket(rank, size)
    model = DDP(seeded(models.Deep, 6), bucket_cap_mb=0.002)
    hook = gradwire.register(model, Dying(guilty, at=8))
    text = raised(RuntimeError, lambda: train(model, (batch(rank, step) for step in range(20))))
    hook.close()
    Path(folder, f"{rank}.txt").write_text(text)
    assert dist.is_initialized()
