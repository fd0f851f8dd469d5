"""Private names of torch.compile, and of `torch.distributed._functional_collectives`, which it can trace.

A collective of `torch.distributed` itself breaks the graph, or is replaced by one of these. They are looked up when
this module is imported: the compiler traces what the functions do.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as _traced

_all_gather = getattr(_traced, "all_gather_single", None) or _traced.all_gather_tensor


def traced_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, a new tensor."""
    return _traced.all_reduce(tensor, "sum", group)  # type: ignore[no-any-return]


def traced_all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks one after another. It has been `all_gather_single` since torch 2.13."""
    return _all_gather(tensor, 0, group)


def traced_all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(size, n) -> (size, n): row k goes to rank k."""
    return _traced.all_to_all_single(tensor, None, None, group)


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts before it, so that state fits the uncompiled model too."""
    return name.replace("_orig_mod.", "")


def uncompiled(model: Any) -> Any:
    """The model that torch.compile was given; other models are returned as they are."""
    return getattr(model, "_orig_mod", model)
