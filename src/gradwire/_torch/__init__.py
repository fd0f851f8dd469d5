"""Every use of a private name of torch, one function each, so that a new version of torch is checked in one place.

Each function says what the private name stands for. All names were seen in torch 2.6.0, 2.7.1, 2.9.1, 2.13.0, 2.14.1
and 2.15.0, unless a docstring says otherwise. `make compat` runs the tests on another version of torch, and
`docs/compatibility.md` has the results.

Public names that torch's type stubs hide are imported here too, so that the rest of the package has them typed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import profiler

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore
else:
    from torch.distributed import GradBucket, HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

__all__ = ["GradBucket", "HashStore", "PrefixStore", "ProcessGroupGloo", "Store", "TCPStore"]


def fake_tensors() -> AbstractContextManager[Any]:
    """A mode in which new tensors have a device and a shape but no data (`torch._subclasses`)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def sparse_parts(sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor that need not be coalesced, as the public methods demand."""
    return sparse._indices(), sparse._values()


is_profiled: Callable[[], bool] = partial(attrgetter("_is_profiler_enabled"), profiler)
"""Whether a profiler of torch is at work in this process, whatever the thread (`torch.autograd._profiler_enabled` knows
its own thread only). It is no function, so that a call takes 0.1 us."""


def all_threads() -> Any:
    """The `experimental_config` with which `torch.profiler.profile` records all threads. Seen in torch 2.13.0.

    Returns:
        An `_ExperimentalConfig` of torch.

    Examples:
        >>> with torch.profiler.profile(experimental_config=gradwire.metrics.all_threads()) as profile:
        ...     loss.backward()
    """
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def version(tensor: Tensor) -> int:
    """How often `tensor` was written to in place."""
    return tensor._version
