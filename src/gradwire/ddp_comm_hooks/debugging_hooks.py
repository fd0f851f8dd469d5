"""Drop-in for torch's `debugging_hooks`."""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from typing import Any

import torch

from gradwire._torch import GradBucket
from gradwire.engine.stream import done

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank its own, undivided gradient. It shows the most that any hook can gain; do not train with it."""
    given: Any = bucket  # a pair (gradient, parameter) from DDP's compiled reducer
    own: torch.futures.Future[torch.Tensor] = given[0] if isinstance(given, tuple) else done(given.buffer())
    return own
