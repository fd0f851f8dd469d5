"""Step 5: the only file that calls collectives. Lanes keep their order, and every byte is counted here.

How ranks stay in step, where the backend blocks the host (gloo):

1. All ranks submit the same jobs in the same order, and give them the same tickets: 0, 1, 2, ...
2. The k-th collective of a job goes on lane k, a process group of its own.
3. A lane lets jobs through strictly by ticket. So each group sees the same collectives in the same order on every
   rank, whatever the threads do; and a job only ever waits for jobs with a lower ticket, so nobody waits in a circle.

Lanes are not groups of `dist.new_group`, whose names depend on what else a process has made or destroyed. They are made
from the store of the model's group, by its members alone, under a name that counts up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import _functional_collectives as _traced

from gradwire.errors import ExchangeError
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
        out = empty((self.size, tensor.numel()), tensor.dtype, tensor.device)
        sent_bytes = _bytes(tensor) * (self.size - 1)
        self._collect("all_gather", lambda group: group._allgather_base(out.view(-1), tensor), sent_bytes)
        return out

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


class Lane:
    """A process group, and whose turn it is on it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._turn = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, ticket: int, issue: Callable[[Any], Any]) -> tuple[float, float]:
        """Wait for the ticket's turn, issue, let the next one in, wait for the end. Returns both waiting times."""
        asked = time.perf_counter()
        work = self._pass(ticket, issue)
        issued = time.perf_counter()
        work.wait()
        return issued - asked, time.perf_counter() - issued

    def skip(self, ticket: int) -> None:
        """Let the next ticket in without a collective."""
        self._pass(ticket, lambda group: None)

    def _pass(self, ticket: int, issue: Callable[[Any], Any]) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == ticket or self._error)
            if self._error is not None:
                raise self._error
            work = issue(self.group)
            self._turn += 1
            self._changed.notify_all()
            return work

    def wait_issued(self, ticket: int, timeout_s: float) -> None:
        """Wait until the ticket's collective is on its way, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn > ticket or self._error, timeout_s)

    def break_(self, error: BaseException) -> None:
        """Turn away everybody who waits, and close the connections so that the other ranks' collectives fail too."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
        group, self.group = self.group, None
        if group is not None:
            group.shutdown()


class Lanes:
    """The lanes of one engine over gloo, made by the ranks that use them and nobody else."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self.rank, self.size = rank, size
        self._store = PrefixStore(f"gradwire/{name}", store)
        self._timeout = timeout
        self._lanes: list[Lane] = []
        self.hold = slow_link.get()
        """What makes collectives of coming jobs take longer."""
        self._levels: tuple[Lanes, ...] = ()
        self._broken = False

    def split(self, levels: Levels | None, next_ticket: int) -> None:
        """Make the lanes of both levels, or drop them. All ranks together."""
        self._levels = ()
        if levels is None:
            return
        nodes, node, place = self.size // levels.node, *divmod(self.rank, levels.node)
        inside = Lanes(self._store, place, levels.node, self._timeout, f"{next_ticket}/node/{node}")
        across = Lanes(self._store, node, nodes, self._timeout, f"{next_ticket}/place/{place}")
        inside.hold, across.hold = None, self.hold  # an emulated link is the one between the nodes
        inside.open(levels.inside, next_ticket)
        across.open(levels.across, next_ticket)
        self._levels = (inside, across)

    def open(self, count: int, next_ticket: int) -> None:
        """Make lanes until there are `count`, which all ranks must ask for; `next_ticket` is the next one let in."""
        while len(self._lanes) < count:
            store = PrefixStore(f"lane/{len(self._lanes)}", self._store)
            lane = Lane(ProcessGroupGloo(store, self.rank, self.size, self._timeout))
            lane._turn = next_ticket
            self._lanes.append(lane)

    def comm(self, ticket: int) -> GroupComm:
        """The collectives of the job with this ticket."""
        made = GroupComm(self.rank, self.size, lambda lane, issue: self._lane(lane).run(ticket, issue), self.hold)
        made.levels = tuple(lanes.comm(ticket) for lanes in self._levels)
        for part in made.levels:
            part.traffic = made.traffic
        return made

    def wait_started(self, ticket: int, timeout_s: float) -> None:
        """Wait until the job's first collective is on its way, but not for long."""
        first = self._levels[0] if self._levels else self
        first._lane(0).wait_issued(ticket, timeout_s)

    def finish(self, ticket: int, comm: GroupComm) -> None:
        """The job is done: let the next one through the lanes it did not use."""
        for lane in self._lanes[comm.used :]:
            lane.skip(ticket)
        for lanes, part in zip(self._levels, comm.levels, strict=True):
            lanes.finish(ticket, part)

    def break_(self, error: BaseException) -> None:
        """This rank cannot go on: say why to the others, and end their waiting."""
        if self._broken:
            return
        self._broken = True
        if not isinstance(error, ExchangeError):
            self._say(f"rank {self.rank}: {type(error).__name__}: {error}")
        for lane in (*self._lanes, *(lane for lanes in self._levels for lane in lanes._lanes)):
            lane.break_(error)

    def blame(self) -> str:
        """What another rank said before it broke its lanes; empty if it said nothing."""
        try:
            return self._store.get("error").decode() if self._store.check(["error"]) else ""
        except RuntimeError:
            return ""

    def close(self) -> None:
        """Drop the groups. Jobs must have ended."""
        self._lanes.clear()
        self._levels = ()

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # the store died with its rank: the closed connections must do
            self._store.set("error", text)

    def _lane(self, index: int) -> Lane:
        if index >= len(self._lanes):
            raise ExchangeError(f"the exchange issued collective {index + 1} but declares lanes={len(self._lanes)}")
        return self._lanes[index]


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

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """(size, n) -> (size, n)."""
        return _traced.all_to_all_single(tensor, None, None, self.group)


def gather_texts(comm: Comm, text: str, device: torch.device) -> list[str]:
    """What every rank says, in the order of the ranks. Only the first 255 bytes travel."""
    said = torch.frombuffer(bytearray(text.encode()[:255].ljust(256, b"\0")), dtype=torch.uint8).to(device)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in comm.all_gather(said).cpu()]


def _bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return sum(map(_bytes, _parts(tensor)))
    return tensor.numel() * tensor.element_size()


def _parts(sparse: Tensor) -> Sequence[Tensor]:
    return sparse._indices(), sparse._values()
