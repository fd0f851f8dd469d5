"""Step 5: the collectives as a job sees them. Every byte is counted here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as _traced

from gradwire.scratch import empty


class Comm(Protocol):
    """The collectives as one job sees them. All block until the result is there (or, on a stream, is enqueued).

    New tensors that come back are work space of the job: copy what must outlive it.
    """

    @property
    def rank(self) -> int:
        """This rank, within the group."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(n,) on each rank -> (size, n), in the order of the ranks."""

    def rows(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(size, numel) of work space: put one's own row there, and `all_gather_` has no need to copy it."""

    def all_gather_(self, rows: Tensor) -> Tensor:
        """Like `all_gather` of the row that is one's own; `rows`, filled."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """(size, n) -> (size, n): row r goes to rank r, and row r comes from rank r."""


@dataclass(slots=True)
class Traffic:
    """What one job moved, and how long its collectives took."""

    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    wire_s: float = 0.0
    """From issuing each collective to its end."""
    queue_s: float = 0.0
    """Waiting for the job's turn on a lane."""
    first_s: float | None = None
    """When the first collective was asked for (`time.perf_counter`)."""


Hold = Callable[[str, int, float, float], float]
"""Waits as a slower link would: told the collective's name, the ranks, the bytes sent and how long it has taken so far,
returns how much longer it was made to take."""

slow_link: ContextVar[Hold | None] = ContextVar("slow_link", default=None)
"""Engines made while this is set are held up by it: see `advisor.link.emulate`."""


class Levels(NamedTuple):
    """How ranks are split into nodes, for `policies.two_level`."""

    node: int
    """Ranks of a node, consecutive ones."""
    inside: int
    """Lanes among the ranks of a node."""
    across: int
    """Lanes among ranks that have the same place in their nodes."""


class GroupComm:
    """Collectives on `groups`: the k-th one on the k-th group, each in its turn."""

    def __init__(
        self,
        rank: int,
        size: int,
        run: Callable[[int, Callable[[Any], Any]], tuple[float, float]],
        hold: Hold | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.traffic = Traffic()
        self.used = 0
        self.levels: tuple[GroupComm, ...] = ()
        """The collectives inside the node and across the nodes, if the engine was opened with levels."""
        self._run, self._hold = run, hold

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Ring: every value crosses the wire 2 (size - 1) / size times."""
        sent_bytes = _bytes(tensor) * 2 * (self.size - 1) / self.size
        self._collect("all_reduce", lambda group: group.allreduce([tensor]), sent_bytes)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Everything to everybody: size - 1 times."""
        return self._all_gather(self.rows(tensor.numel(), tensor.dtype, tensor.device), tensor)

    def rows(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Work space of the job."""
        return empty((self.size, numel), dtype, device)

    def all_gather_(self, rows: Tensor) -> Tensor:
        """The same, in place."""
        return self._all_gather(rows, rows[self.rank])

    def _all_gather(self, rows: Tensor, own: Tensor) -> Tensor:
        sent_bytes = _bytes(own) * (self.size - 1)
        self._collect("all_gather", lambda group: group._allgather_base(rows.view(-1), own), sent_bytes)
        return rows

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Every row but one's own: (size - 1) / size times."""
        out = empty(tensor.shape, tensor.dtype, tensor.device)
        sent_bytes = _bytes(tensor) * (self.size - 1) / self.size
        self._collect("all_to_all", lambda group: group.alltoall_base(out, tensor, [], []), sent_bytes)
        return out

    def _collect(self, name: str, issue: Callable[[Any], Any], moved_bytes: float) -> None:
        if self.traffic.first_s is None:
            self.traffic.first_s = time.perf_counter()
        lane, self.used = self.used, self.used + 1
        queue_s, wire_s = self._run(lane, issue)
        if self._hold is not None:
            wire_s += self._hold(name, self.size, moved_bytes, wire_s)
        self.traffic.queue_s += queue_s
        self.traffic.wire_s += wire_s
        self.traffic.sent_bytes += moved_bytes
        self.traffic.received_bytes += moved_bytes


def inline_comm(group: Any, levels: Sequence[Any] = ()) -> GroupComm:
    """Collectives on one group, issued at once by the calling thread: for accelerators, in stream order."""

    def run(lane: int, issue: Callable[[Any], Any]) -> tuple[float, float]:
        issued = time.perf_counter()
        issue(group).wait()  # on an accelerator this makes the stream wait, not the host
        return 0.0, time.perf_counter() - issued

    made = GroupComm(group.rank(), group.size(), run)
    made.levels = tuple(inline_comm(part) for part in levels)
    for part in made.levels:
        part.traffic = made.traffic
    return made


def level_groups(group: dist.ProcessGroup, levels: Levels) -> tuple[Any, ...]:
    """This rank's groups inside its node and across the nodes. Its members alone make a group."""
    ranks, (node, place) = dist.get_process_group_ranks(group), divmod(group.rank(), levels.node)
    inside, across = ranks[node * levels.node :][: levels.node], ranks[place :: levels.node]
    return tuple(dist.new_group(part, use_local_synchronization=True) for part in (inside, across))


_traced_all_gather = getattr(_traced, "all_gather_single", None) or _traced.all_gather_tensor  # renamed in torch 2.13


class TracedComm:
    """Collectives that torch.compile can trace, for DDP's compiled reducer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks."""
        return tensor.copy_(_traced.all_reduce(tensor, "sum", self.group))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(n,) -> (size, n)."""
        return _traced_all_gather(tensor, 0, self.group).view(self.size, -1)

    def rows(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(size, numel)."""
        return torch.empty((self.size, numel), dtype=dtype, device=device)

    def all_gather_(self, rows: Tensor) -> Tensor:
        """A new tensor: the compiler decides what is in place."""
        return self.all_gather(rows[self.rank])

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """(size, n) -> (size, n)."""
        return _traced.all_to_all_single(tensor, None, None, self.group)


MOST_BYTES = 255


def gather_texts(comm: Comm, text: str, device: torch.device) -> list[str]:
    """What every rank says, in the order of the ranks. Of long texts the beginning and a checksum travel."""
    if len(text.encode()) > MOST_BYTES:  # so that a difference in the end shows too
        start = text.encode()[: MOST_BYTES // 2].decode(errors="ignore")
        text = f"{start}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
    said = torch.frombuffer(bytearray(text.encode()[:MOST_BYTES].ljust(256, b"\0")), dtype=torch.uint8).to(device)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in comm.all_gather(said).cpu()]


def _bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return sum(map(_bytes, _parts(tensor)))
    return tensor.numel() * tensor.element_size()


def _parts(sparse: Tensor) -> Sequence[Tensor]:
    return sparse._indices(), sparse._values()
