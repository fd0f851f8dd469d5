"""Exchange: which collectives average a bucket, in which order. Everything that the engine may use is declared here.

To write an exchange, subclass `Exchange` as a frozen dataclass whose fields are the options of its spec, and implement
`mean_` and `bound`. `mean_` is straight-line code: it calls the collectives of `comm` one after the other, and the
engine keeps them in the same order on all ranks. All other members have a default that suits a simple exchange.

    @dataclass(frozen=True, slots=True)
    class Halves(Exchange):
        '''Send float16.'''

        name: ClassVar[str] = "halves"

        def bound(self, size: int) -> float:
            return size * 2.0**-10

        def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
            bucket.flat.copy_(comm.all_reduce_(bucket.flat.div(comm.size).half()))

Register it as an entry point of the group `gradwire.exchanges`, and `gradwire.register(model, "halves")` finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.exchanges.bucket import Bucket, Memory
from gradwire.exchanges.reference import Reference
from gradwire.spec import changed, write

DEFAULT_BUCKETS = 8
DEFAULT_CHUNK_BYTES = 4 << 20


class Comm(Protocol):
    """The collectives as one job sees them. Each one blocks until its result is there (on a stream: is enqueued).

    New tensors that a collective returns are work space of the job: copy what must outlive the job.

    Examples:
        >>> total = comm.all_reduce_(bucket.flat.div(comm.size))
    """

    @property
    def rank(self) -> int:
        """This rank, within the group."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def levels(self) -> Sequence[Comm]:
        """The collectives inside the node and across the nodes, for an exchange whose `levels` are not None."""

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(n,) on each rank -> (size, n), in the order of the ranks."""

    def rows(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(size, numel) of work space. Write this rank's row there, and `all_gather_` does not need to copy it."""

    def all_gather_(self, rows: Tensor) -> Tensor:
        """Like `all_gather` of this rank's row of `rows`; fills and returns `rows`."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """(size, n) -> (size, n): row r is sent to rank r, and row r of the result comes from rank r."""


class Levels(NamedTuple):
    """How the ranks are split into nodes, for an exchange that works on two levels."""

    node: int
    """The number of ranks of a node; a node's ranks are consecutive."""
    inside: int
    """The number of lanes among the ranks of a node."""
    across: int
    """The number of lanes among the ranks that have the same position in their nodes."""


class Exchange(ABC):
    """Averages a bucket over the ranks, in place. `str()` of an exchange is the spec that makes it.

    Subclass it as a frozen dataclass whose fields are the options of the spec, and implement `mean_` and `bound`. All
    other members have defaults.

    Examples:
        >>> str(gradwire.exchange("int4:block=32"))
        'int4:block=32'
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    """The name in a spec."""

    # -- what an exchange must have ----------------------------------------------------------------------------

    @abstractmethod
    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Replace `bucket.flat` by the mean over the ranks, with the same bits on all of them.

        Args:
            bucket: The gradients. Inf or NaN on any rank must reach the result on every rank.
            comm: The collectives. All ranks must call the same ones in the same order with the same sizes.
            residual: With `takes_residual`, a float32 tensor like `bucket.flat` in units of undivided gradients. It is
                added to the gradients first, and then holds what this rank's share of the mean has lost. If the mean is
                not finite it stays as it was (`gradwire.exchanges.feedback.fed_back` does that).
        """

    @abstractmethod
    def bound(self, size: int) -> float | None:
        """The worst-case error: `|result - mean| <= bound * rms_i |x_i|`, 2-norms over `size` ranks; None if unbounded.

        It holds for one step without feedback, for finite values in the normal range of the wire.
        """

    # -- what an exchange may declare --------------------------------------------------------------------------

    @property
    def averages(self) -> bool:
        """Whether the result is the mean. Only `noop`, which leaves the gradients alone, returns False."""
        return True

    @property
    def lanes(self) -> int:
        """The largest number of collectives that one `mean_` issues; 0 if it never communicates."""
        return 1

    @property
    def takes_residual(self) -> bool:
        """Whether `mean_` uses error feedback."""
        return False

    @property
    def packs_residual(self) -> bool:
        """Whether the residual is to be kept in 8 bits, which only hooks of sharded models can do."""
        return False

    @property
    def align(self) -> int:
        """Chunks are cut at multiples of (ranks x align) values; 0: only between tensors."""
        return 1

    @property
    def buckets(self) -> int:
        """Into how many DDP buckets `register` cuts a CPU model; 0: leave DDP's own."""
        return DEFAULT_BUCKETS

    @property
    def warmup(self) -> int:
        """The number of first steps that average exactly."""
        return 0

    @property
    def reads_optimizer(self) -> bool:
        """Whether `mean_` uses `Bucket.moment_of`, so that registration needs the optimizer."""
        return False

    @property
    def same_kernels(self) -> bool:
        """Whether all ranks must use the same kernels (all Numba, or all torch) for the results to be identical."""
        return False

    @property
    def traceable(self) -> bool:
        """Whether `torch.compile` can trace `mean_`. It must then keep no state and not depend on the step."""
        return False

    def reference(self, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None = None) -> Reference | None:
        """The result of `mean_`, calculated in the plainest way. `gradwire.testing` and `Hook.verify` compare with it.

        It must not use the code of `mean_`, or it would repeat its mistakes. `gradwire.exchanges.reference` has what
        it can be made of.

        Args:
            buckets: The gradients of every rank, in the order of the ranks, which stay as they are. All have the same
                `memory`, which the reference reads and updates as `mean_` does on each rank.
            residuals: With `takes_residual`, those of every rank. They stay as they are.

        Returns:
            The mean, its tolerance and the new residuals. None, the default: there is only `bound`, and a simulation
            of `mean_` without an engine (`gradwire.exchanges.simulated`), to compare with.
        """
        return None

    def chunk_bytes(self, size: int) -> int:
        """How many bytes of gradient travel at a time on `size` ranks: few enough to overlap, enough to be fast."""
        return DEFAULT_CHUNK_BYTES

    def levels(self, size: int) -> Levels | None:
        """How `size` ranks are split into nodes; None: they are not. Called at registration."""
        return None

    def check(self, params: Sequence[tuple[str, Tensor]]) -> None:
        """Raise SpecError, or warn, if the exchange makes no sense for these parameters. Called at registration."""
        return

    def check_memory(self, memory: Mapping[str, Mapping[str, Tensor]], params: Sequence[tuple[str, Tensor]]) -> None:
        """Raise StateError if `memory` (see `Bucket.memory`), read from a checkpoint, does not fit these parameters."""
        return

    def new_memory(self, params: Sequence[tuple[str, Tensor]], device: torch.device) -> Memory:
        """What `Bucket.memory` will hold for these parameters after a step, as zeros, which stand for nothing yet.

        `torch.distributed.checkpoint` loads into tensors of the right shapes, so a new hook must know them.
        """
        return {}

    def warm_up(self, device: torch.device) -> None:
        """Use every kernel once, so that no training step waits for a compiler. Called at registration."""
        return

    def __str__(self) -> str:
        """The spec: the name, and the options that differ from their defaults."""
        return write(self.name, changed(self))
