"""Lanes: collectives in the same order on every rank, for backends that block the host (gloo).

1. All ranks submit the same jobs in the same order, and give them the same tickets: 0, 1, 2, ...
2. The k-th collective of a job goes on lane k, a process group of its own.
3. A lane lets jobs through strictly by ticket. So each group sees the same collectives in the same order on every rank,
   whatever the threads do; and a job only ever waits for jobs with a lower ticket, so there is no deadlock.

Lanes are not groups of `dist.new_group`, whose names depend on what else a process has made or destroyed. They are made
from the store of the model's group, by its members alone, under a name that counts up. Every byte is counted here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from gradwire._torch import PrefixStore, Store, sparse_parts
from gradwire.engine.gloo import FAR_S, THREADS, jobs_in_flight, new_group
from gradwire.engine.links import Door
from gradwire.errors import ExchangeError
from gradwire.exchanges.base import Levels
from gradwire.kernels.memory import empty


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
    """When the first collective was requested (`time.perf_counter`)."""


Hold = Callable[[str, int, float, float], float]
"""Waits as a slower link would. It takes the collective's name, the number of ranks, the bytes sent and the seconds the
collective has taken so far, and returns by how many seconds it has prolonged it."""

slow_link: ContextVar[Hold | None] = ContextVar("slow_link", default=None)
"""Engines that are made while this is set are slowed down by it: see `gradwire.advisor.emulate`."""


POLL_S = 0.02
LOST_S = 1.0
"""How often a thread that waits for a collective looks whether this rank has given up."""
SURVIVORS_S = 1.0
"""How long a rank waits for the others to say that they have failed too. Those that do not are named."""
MOST_MESSAGES = 6
"""How many small messages show the latency of a group."""
STORE_S = 1.5
"""How long it waits for the store, which does not answer if this rank is cut off from the network."""
T = TypeVar("T")


class GroupComm:
    """The collectives of one job: the k-th one on the k-th group, each in its turn. See `exchanges.base.Comm`.

    A collective on an empty tensor is left out: all ranks know that from the size, and not all backends take one.
    """

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
        self.collective = ""
        """The name of the collective that was requested last, for error messages."""
        self.levels: tuple[GroupComm, ...] = ()
        """The collectives inside the node and across the nodes, if the engine was opened with levels."""
        self.ranges: Ranges | None = None
        """While a profiler is active: the ranges of the job in its trace."""
        self._run, self._hold = run, hold

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Ring: every value crosses the wire 2 (size - 1) / size times."""
        if tensor.numel() == 0:
            return tensor
        sent_bytes = _bytes(tensor) * 2 * (self.size - 1) / self.size
        self._collect("all_reduce", lambda group: group.all_reduce(tensor), sent_bytes)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every value is sent to all other ranks: size - 1 times."""
        return self._all_gather(self.rows(tensor.numel(), tensor.dtype, tensor.device), tensor)

    def rows(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Work space of the job."""
        return empty((self.size, numel), dtype, device)

    def all_gather_(self, rows: Tensor) -> Tensor:
        """The same, in place."""
        return self._all_gather(rows, rows[self.rank])

    def _all_gather(self, rows: Tensor, own: Tensor) -> Tensor:
        if rows.numel() == 0:
            return rows
        sent_bytes = _bytes(own) * (self.size - 1)
        self._collect("all_gather", lambda group: group.all_gather(rows.view(-1), own), sent_bytes)
        return rows

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Every row but the own one is sent: (size - 1) / size times."""
        out = empty(tensor.shape, tensor.dtype, tensor.device)
        if out.numel() == 0:
            return out
        sent_bytes = _bytes(tensor) * (self.size - 1) / self.size
        self._collect("all_to_all", lambda group: group.all_to_all(out, tensor), sent_bytes)
        return out

    def _collect(self, name: str, issue: Callable[[Any], Any], moved_bytes: float) -> None:
        if self.traffic.first_s is None:
            self.traffic.first_s = time.perf_counter()
        lane, self.used, self.collective = self.used, self.used + 1, name
        if self.ranges is not None:
            self.ranges.begin(f"wire ({name} on lane {lane})")
        queue_s, wire_s = self._run(lane, issue)
        if self._hold is not None:
            wire_s += self._hold(name, self.size, moved_bytes, wire_s)
        if self.ranges is not None:
            self.ranges.begin("decode")
        self.traffic.queue_s += queue_s
        self.traffic.wire_s += wire_s
        self.traffic.sent_bytes += moved_bytes
        self.traffic.received_bytes += moved_bytes


class Ranges:
    """The phases of one job in a trace of `torch.profiler`: encode, then wire and decode for each collective."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._open: record_function | None = None

    def begin(self, phase: str) -> None:
        """The phase before is over."""
        self.end()
        self._open = record_function(f"gradwire {phase}: {self._where}")
        self._open.__enter__()

    def end(self) -> None:
        """The job is over."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None


def profiled(job: Callable[[Any], None], where: str) -> Callable[[Any], None]:
    """The job, with ranges for an active profiler. `where` names it, such as "step 5, bucket 0, chunk 2"."""

    def run(comm: GroupComm) -> None:
        ranges = Ranges(where)
        for part in (comm, *comm.levels):
            part.ranges = ranges
        ranges.begin("encode")
        try:
            job(comm)
        finally:
            ranges.end()

    return run


class Lane:
    """A process group, and whose turn it is on it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._turn = 0
        self._passed: set[int] = set()
        """Tickets that no longer need a turn."""
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: dict[int, threading.Condition] = {}
        """Waiting threads by the turn that they wait for, so that a turn wakes only the threads it concerns."""

    def close(self) -> None:
        """No collective is under way, and none will come."""
        group = self.group
        if group is not None:
            group.close()

    def begin_at(self, ticket: int) -> None:
        """Set the next ticket to be let in; no thread may be waiting."""
        self._turn = ticket

    def run(self, ticket: int, issue: Callable[[Any], Any]) -> tuple[float, float]:
        """Wait for the ticket's turn, issue the collective, let the next ticket in, and wait for the end.

        Returns the seconds waited for the turn, and those waited for the collective.
        """
        requested = time.perf_counter()
        work = self._pass(ticket, issue)
        issued = time.perf_counter()
        self._wait_end(work)
        return issued - requested, time.perf_counter() - issued

    def _wait_end(self, work: Any) -> None:
        """Wait for the end of a collective, but not once this rank has closed its connections.

        Then collectives fail at once, except for one whose message gloo was about to send when the other side closed
        the connection: gloo forgets that message, and its collective would only end at the time limit.
        """
        while not has_ended(work, LOST_S):
            if self._error is not None:
                raise self._error

    def skip(self, ticket: int) -> None:
        """Let the next ticket in without a collective, once it is this one's turn; does not wait for that."""
        with self._lock:
            self._passed.add(ticket)
            self._let_in_next()

    def _pass(self, ticket: int, issue: Callable[[Any], Any]) -> Any:
        with self._lock:
            self._wait_for(ticket)
            if self._error is not None:
                raise self._error
            work = issue(self.group)
            self._passed.add(ticket)
            self._let_in_next()
            return work

    def _let_in_next(self) -> None:
        while self._turn in self._passed:
            self._passed.remove(self._turn)
            self._turn += 1
            if self._turn in self._waiting:
                self._waiting.pop(self._turn).notify_all()

    def _wait_for(self, turn: int, timeout_s: float | None = None) -> None:
        """Holding the lock: until it is, or has been, that turn, or somebody has failed."""
        if self._turn < turn and self._error is None:
            woken = self._waiting.setdefault(turn, threading.Condition(self._lock))
            woken.wait_for(lambda: self._turn >= turn or self._error, timeout_s)

    def wait_issued(self, ticket: int, timeout_s: float) -> None:
        """Wait until the ticket's collective is on its way, but not for long."""
        with self._lock:
            self._wait_for(ticket + 1, timeout_s)

    def break_(self, error: BaseException) -> threading.Thread:
        """Raise in all threads that wait, and close the connections: collectives fail, those of the other ranks too.

        Returns the thread that drops the group. It ends when all of the group's collectives have ended, even those that
        gloo has forgotten.
        """
        with self._lock:
            self._error = error
            for woken in self._waiting.values():
                woken.notify_all()
        groups, self.group = [self.group], None
        closed = threading.Event()
        thread = threading.Thread(target=_drop, args=(groups, closed), name="gradwire-drop", daemon=True)
        thread.start()
        closed.wait()
        return thread


def _drop(groups: list[Any], closed: threading.Event) -> None:
    """Close the connections of a group, then drop it. The list must have the only reference."""
    try:
        if groups[0] is not None:
            groups[0].shutdown()
    finally:
        closed.set()
        groups.clear()


class Lanes:
    """The lanes of one engine over gloo, made by the ranks that use them and by no other ranks."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self.rank, self.size = rank, size
        self._store = PrefixStore(f"gradwire/{name}", store)
        self._timeout = timeout
        self._lanes: list[Lane] = []
        self.hold = slow_link.get()
        """What makes collectives of coming jobs take longer."""
        self._levels: tuple[Lanes, ...] = ()
        self._made: dict[Levels, tuple[Lanes, ...]] = {}
        self.in_flight = THREADS
        """How many jobs the lanes are made for. The first one shows the latency, and with it how many are needed."""
        self._breaking = threading.Lock()
        self.error: BaseException | None = None
        """Why this rank has closed its connections."""
        self.dropping: list[threading.Thread] = []
        """The threads that drop the groups of closed connections."""
        self.cut_off = False
        """Whether the store did not answer in time. Nobody asks it again."""
        self.patience_s = SURVIVORS_S
        """How long an error waits until it is clear who is to blame."""

    def split(self, levels: Levels | None, next_ticket: int) -> None:
        """Use the lanes of both levels from the next ticket on, made if they are not there yet. All ranks together."""
        if levels is not None and levels not in self._made:
            self._made[levels] = self._make(levels, next_ticket)
        self._levels = () if levels is None else self._made[levels]
        for lane in (lane for lanes in self._levels for lane in lanes._lanes):
            lane.begin_at(next_ticket)

    def _make(self, levels: Levels, next_ticket: int) -> tuple[Lanes, ...]:
        nodes, node, place = self.size // levels.node, *divmod(self.rank, levels.node)
        inside = Lanes(self._store, place, levels.node, self._timeout, f"{next_ticket}/node/{node}")
        across = Lanes(self._store, node, nodes, self._timeout, f"{next_ticket}/place/{place}")
        inside.hold, across.hold = None, self.hold  # an emulated link is the one between the nodes
        inside.open(levels.inside, next_ticket)
        across.open(levels.across, next_ticket)
        return inside, across

    def open(self, count: int, next_ticket: int) -> None:
        """Make lanes until there are `count`, which all ranks must ask for; `next_ticket` is the next one let in."""
        while len(self._lanes) < count:
            store = PrefixStore(f"lane/{len(self._lanes)}", self._store)
            lane = Lane(self._connected(store) if self._lanes else self._first(store))
            lane.begin_at(next_ticket)
            self._lanes.append(lane)

    def _first(self, store: Store) -> Any:
        """The group of the first lane: made again, for more jobs, if it shows that the ranks are far apart."""
        group = self._connected(store, measure=True)
        if self.in_flight == THREADS:
            return group
        return self._connected(PrefixStore("far", store))

    def _latency_s(self, group: Any) -> float:
        """The shortest time that a message of a few bytes to all ranks has taken on any rank; the same on all ranks.

        Each message tells how long the ones before took. A busy core delays some of them, so there are more if all were
        slow.
        """
        least, everybody = torch.full((1,), torch.inf), torch.full((self.size,), torch.inf)
        for _ in range(MOST_MESSAGES):
            began = time.perf_counter()
            group.all_gather(everybody, least).wait()
            taken_s = time.perf_counter() - began
            if self.hold is not None:
                taken_s += self.hold("all_gather", self.size, _bytes(least) * (self.size - 1), taken_s)
            least = least.clamp(max=taken_s)
            if everybody.min() <= FAR_S:
                break
        return float(everybody.min())

    def _connected(self, store: Store, *, measure: bool = False) -> Any:
        """A group of all ranks; raises ExchangeError with the ranks that did not come, or have given up already."""
        left = [rank for rank in range(self.size) if self._store.check([f"failed/{rank}"])]
        if left:  # gloo would try to connect to each of them until the time limit
            who = ", ".join(map(str, left))
            raise ExchangeError(f"rank {self.rank} comes too late: rank {who} did not wait for it, or has failed")
        try:
            with Door(store, self.rank, self.size) as door:
                store.set(f"here/{self.rank}", "")
                group = new_group(store, self.rank, self.size, self._timeout, self.in_flight)
                if self.size > 1:
                    group = door.linked(group, self._timeout)
            if measure and self.size > 1:
                self.in_flight = jobs_in_flight(self._latency_s(group))
            return group
        except RuntimeError as error:
            absent: list[int] = []
            with suppress(RuntimeError):  # the store is gone too
                absent = [rank for rank in range(self.size) if not store.check([f"here/{rank}"])]
            missing = self.missing(0.0 if absent else self.patience_s)
            who = ", ".join(map(str, absent or missing)) or "unknown"
            raise ExchangeError(
                f"rank {self.rank} could not connect to the others: rank {who} did not come within "
                f"{self._timeout.total_seconds():g} s. It has failed, or does not make the same calls [{error}]"
            ) from error

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
        """This rank cannot go on: tell the others why, and end all waiting, here and there."""
        with self._breaking:
            if self.error is not None:
                return
            self.error = error
        if not isinstance(error, ExchangeError):
            self.publish_error(f"{type(error).__name__}: {error}")
        parts = [lanes for made in self._made.values() for lanes in made]
        for lane in (*self._lanes, *(lane for lanes in parts for lane in lanes._lanes)):
            self.dropping.append(lane.break_(error))

    def publish_error(self, text: str) -> None:
        """Leave a message for the other ranks in the store."""
        self._ask(lambda: self._store.set("error", f"rank {self.rank}: {text}"), None)

    def peer_error(self) -> str:
        """The message that another rank left before it closed its lanes; empty if there is none."""
        return self._ask(self._read_error, "")

    def _read_error(self) -> str:
        return self._store.get("error").decode(errors="replace") if self._store.check(["error"]) else ""

    def missing(self, wait_s: float) -> list[int]:
        """The ranks that do not say within this time that they have failed too: they are gone, or stuck."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        lost = others if self.cut_off or 0 not in others else [0]  # a store nearly always dies with rank 0
        found = self._ask(lambda: self._silent(others, wait_s), lost, wait_s + STORE_S)
        return others if self.cut_off else found

    def _silent(self, others: list[int], wait_s: float) -> list[int]:
        until_s = time.monotonic() + wait_s
        self._store.set(f"failed/{self.rank}", "")
        while others and time.monotonic() < until_s:
            others = [rank for rank in others if not self._store.check([f"failed/{rank}"])]
            time.sleep(POLL_S)
        return others

    def _ask(self, question: Callable[[], T], otherwise: T, wait_s: float = STORE_S) -> T:
        """What the store answers, or `otherwise`: it died with its rank, or cannot be reached.

        torch waits without limit for the answer of a store behind a broken link, so a thread asks.
        """
        answer: list[T] = []

        def main() -> None:
            with suppress(RuntimeError):
                answer.append(question())

        if not self.cut_off:
            thread = threading.Thread(target=main, name="gradwire-store", daemon=True)
            thread.start()
            thread.join(wait_s)
            self.cut_off = thread.is_alive()
        return answer[0] if answer else otherwise

    def close(self) -> None:
        """Drop the groups. Jobs must have ended."""
        for lane in self._lanes:
            lane.close()
        for levels in self._made.values():
            for lanes in levels:
                lanes.close()
        self._lanes.clear()
        self._made.clear()
        self._levels = ()

    def _lane(self, index: int) -> Lane:
        if index >= len(self._lanes):
            raise ExchangeError(f"the exchange issued collective {index + 1} but declares lanes={len(self._lanes)}")
        return self._lanes[index]


def _bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return sum(map(_bytes, sparse_parts(tensor)))
    return tensor.numel() * tensor.element_size()


def has_ended(work: Any, within_s: float) -> bool:
    """Wait for the end of a collective, but not for longer. Its error is raised; False if it has not ended."""
    try:
        work.wait(timedelta(seconds=within_s))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()
    return True
