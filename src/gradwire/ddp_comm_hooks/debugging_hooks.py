"""Drop-in for torch's `debugging_hooks`."""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from gradwire.ddp_comm_hooks._group import averaged

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Every rank keeps its own, undivided gradient: the upper limit of what any hook can gain. Not for training."""
    return averaged("noop", None, bucket)


noop_hook.spec = "noop"  # type: ignore[attr-defined]
