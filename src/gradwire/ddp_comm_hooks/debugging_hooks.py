"""Drop-in for torch's `debugging_hooks`."""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from typing import Any

import torch

from gradwire._torch import GradBucket
from gradwire.engine.stream import done

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Every rank keeps its own, undivided gradient: the upper limit of what any hook can gain. Not for training."""
    kept: torch.futures.Future[torch.Tensor] = own(bucket)
    return kept


def own(bucket: Any) -> Any:
    """What is in a `GradBucket`, or in the (gradient, parameter) pair of DDP's compiled reducer, as a hook gives it."""
    return bucket[0] if isinstance(bucket, tuple) else done(bucket.buffer())


noop_hook.spec = "noop"  # type: ignore[attr-defined]
