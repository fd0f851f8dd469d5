"""LaneRunner: runs jobs beside the backward pass, in order, and completes a Future for each bucket.

It uses a few threads, for backends that block the host. A job keeps a thread from its first encoding to its last
decoding; while one job waits for the wire, others encode and decode: that is the whole pipeline. For backends that do
not block the host, see `stream.py`.
"""

import math
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.futures import Future

from gradwire._torch import is_profiled
from gradwire.engine.lanes import Lanes, Traffic, profiled
from gradwire.engine.leaving import has_left, leave_at_exit
from gradwire.engine.links import LostConnection
from gradwire.engine.stats import Stats
from gradwire.errors import CLOSED, ExchangeError
from gradwire.exchanges.base import Comm, Levels
from gradwire.kernels.memory import Scratch, Usage

Job = Callable[[Comm], None]
"""Averages one chunk, through the collectives that it is given."""

KICK_S = 0.005
"""How long the backward thread waits for the first collective of an idle wire to be issued: on a busy core, a worker
that it has just woken gets neither the GIL nor the core before a whole time slice has passed."""
CUT_OFF = "application timeout caused pair closure"
"""gloo's message to threads that wait on a connection which the time limit of another thread has closed."""
AT_CLOSE_S = 20
"""How long threads may take to end what is queued. Then the connections are closed, and what still waits fails."""
DROP_S = 2
"""How long groups may take to be dropped once their connections are closed. That takes no time, unless gloo has
forgotten a message (see `Lane`): then it takes as long as the time limit of the group."""


class Meter:
    """Adds up what jobs have moved and how long they took. Called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.memory = Usage()
        """What the jobs hold besides the tensors that they are given."""
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._steps = self._buckets = 0
            self._sent = self._received = self._encode = self._wire = self._decode = self._waited = 0.0
            self._called = self._ended = 0.0
            self.memory.restart()

    def fresh(self) -> Self:
        """Another meter of the same kind, at zero."""
        return type(self)()

    def begin(self, first: bool) -> None:
        """A bucket has arrived; `first`: it opens a step."""
        with self._lock:
            if first:
                self._close_step()
                self._steps += 1
            self._buckets += 1
            self._called = time.perf_counter()

    def add(self, traffic: Traffic, began: float, ended: float) -> None:
        """A job has ended. `began` and `ended` are of `time.perf_counter`."""
        first = traffic.first_s if traffic.first_s is not None else ended
        self.count(traffic)
        with self._lock:
            self._wire += traffic.wire_s
            self._encode += first - began
            self._decode += max(ended - first - traffic.wire_s - traffic.queue_s, 0.0)
            self._ended = max(self._ended, ended)

    def count(self, traffic: Traffic) -> None:
        """Count the bytes of a job."""
        with self._lock:
            self._sent += traffic.sent_bytes
            self._received += traffic.received_bytes

    def stats(self, hook: str, reason: str = "", kernels: str = "") -> Stats:
        """Averages so far."""
        with self._lock:
            self._close_step()
            steps, timed = max(self._steps, 1), self.timed_steps()
            buckets, sent, received = (value / steps for value in (self._buckets, self._sent, self._received))
            sums = (self._encode, self._wire, self._decode, self._waited)
            times = (math.nan if timed == 0 < self._steps else value / max(timed, 1) for value in sums)
            encode, wire, decode, waited = times
            moved, peak = (buckets, sent, received), self.memory.peak_bytes
            return Stats(hook, self._steps, *moved, encode, wire, decode, waited, reason, timed, kernels, peak)

    def timed_steps(self) -> int:
        """The number of steps that the times are from."""
        return self._steps

    def _close_step(self) -> None:
        self._waited += max(self._ended - self._called, 0.0) if self._called else 0.0
        self._called = self._ended = 0.0


class Runner(Protocol):
    """Runs jobs in the order of submission, the same on every rank."""

    meter: Meter
    """What the jobs have moved, and how long they took."""
    overlaps: bool
    """Whether jobs overlap with each other, so that a large bucket is worth cutting into several."""

    @property
    def in_flight(self) -> int:
        """How many jobs can be under way at once."""

    def check(self) -> None:
        """Raise ExchangeError if no step can begin now."""

    def open(self, lanes: int) -> None:
        """Prepare for jobs of up to `lanes` collectives. All ranks together."""

    def split(self, levels: Levels | None) -> None:
        """Prepare for jobs of two levels, or of one (None). All ranks together."""

    def submit(
        self,
        jobs: Sequence[Job],
        result: Tensor,
        after: Callable[[], None] | None = None,
        *,
        counted: bool = True,
        what: str = "",
    ) -> Future[Tensor]:
        """Run `jobs`, then `after`, and complete the future with `result`; `counted`: in the meter too.

        `what` is where the jobs belong, such as "step 5, bucket 0", for error messages and traces.
        """

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Jobs will use these tensors, which the caller has made, and may drop them while they run."""

    def run(self, job: Job) -> None:
        """Run one job and wait for it."""

    def give_up(self, error: BaseException) -> None:
        """This rank fails for another reason: tell the other ranks, if that is possible."""

    def explained(self, error: RuntimeError, what: str) -> BaseException:
        """A better error for one that a collective of torch has raised. `what`: what it was for."""

    def close(self) -> None:
        """End threads and groups. Submitting afterwards is an error."""


def check_usable(closed: bool, error: BaseException | None) -> None:
    """Raise ExchangeError for a runner that was closed, or whose ranks no longer agree because a job has failed."""
    if closed:
        raise ExchangeError(CLOSED)
    if error is not None:
        raise ExchangeError(f"this hook stopped at an earlier error: {type(error).__name__}: {error}") from error


class _Pending:
    """A future for several jobs, whose tickets begin with `first`.

    A callback computes its value: only so does an error reach DDP with its text.
    """

    def __init__(
        self, first: int, jobs: int, result: Tensor, after: Callable[[], None] | None, counted: bool, what: str
    ) -> None:
        self.first, self.counted, self.what = first, counted, what
        self._gate: Future[None] = Future()
        self._left = jobs
        self._after = after
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.future: Future[Tensor] = self._gate.then(lambda _: self._value(result))

    def _value(self, result: Tensor) -> Tensor:
        if self._error is not None:
            raise self._error
        return result

    def end(self, error: BaseException | None = None) -> bool:
        """One job has ended, or all have failed. True if that settled the future."""
        with self._lock:
            if self._left == 0:
                return False
            self._left = 0 if error is not None else self._left - 1
            self._error = error
            settled = self._left == 0
        if settled and error is None and self._after is not None:
            self._error = self._try(self._after)
        if settled:
            self._gate.set_result(None)
        return settled

    def _try(self, after: Callable[[], None]) -> BaseException | None:
        try:
            after()
        except BaseException as error:
            return error
        return None


class LaneRunner:
    """A pool of threads over lanes."""

    overlaps = True

    def __init__(self, lanes: Lanes, threads: int | None = None) -> None:
        """`threads` is the number of jobs in flight; by default as many as the lanes are made for."""
        self.lanes = lanes
        self.meter = Meter()
        self._jobs: queue.SimpleQueue[tuple[int, Job, _Pending] | None] = queue.SimpleQueue()
        self._open: set[_Pending] = set()
        self._lock = threading.RLock()  # a garbage collection inside of it may close this runner
        self._next_ticket = 0
        self._error: BaseException | None = None
        self._closed = self._failing = False
        self._most, self._threads = threads, list[threading.Thread]()
        self._unfinished = 0
        self.process = os.getpid()
        """The process that has the threads. A fork of it has none."""
        leave_at_exit(self)

    @property
    def in_flight(self) -> int:
        """How many jobs can be under way at once."""
        return self._most or self.lanes.in_flight

    def check(self) -> None:
        """A step can begin at any time; `submit` raises what has gone wrong."""

    def open(self, lanes: int) -> None:
        """Make the lanes that are missing; no job may be under way."""
        self.lanes.open(lanes, self._next_ticket)

    def split(self, levels: Levels | None) -> None:
        """Use lanes of two levels, or of one, from now on; no job may be under way."""
        self.lanes.split(levels, self._next_ticket)

    def submit(
        self,
        jobs: Sequence[Job],
        result: Tensor,
        after: Callable[[], None] | None = None,
        *,
        counted: bool = True,
        what: str = "",
    ) -> Future[Tensor]:
        """Queue the jobs under the next tickets. `after` runs in the thread that ends the last job."""
        self._check_usable()
        pending = _Pending(self._next_ticket, len(jobs), result, after, counted, what)
        with self._lock:
            self._check_usable()  # again: whoever ends what is open must find this too
            idle = not self._open
            self._open.add(pending)
            for job in jobs:
                self._add_thread()
                self._jobs.put((self._next_ticket, job, pending))
                self._next_ticket += 1
        if idle:
            self.lanes.wait_started(pending.first, KICK_S)
        return pending.future

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """A tensor on the CPU lives as long as a job refers to it."""

    def run(self, job: Job) -> None:
        """Run one job in its turn and wait; its error is raised as it is."""
        self._check_usable()
        try:
            self.submit([job], torch.empty(0), counted=False).wait()
        except RuntimeError:
            raise self._error or ExchangeError("the hook was closed meanwhile") from None

    def give_up(self, error: BaseException) -> None:
        """Publish the error, and end the waiting of the other ranks."""
        self.lanes.break_(error)

    def explained(self, error: RuntimeError, what: str) -> BaseException:
        """As if one of the jobs had failed with it."""
        error.add_note(what)
        self._fail(error)
        return self._error or error

    def close(self) -> None:
        """Let queued jobs end, then stop the threads and drop the groups. Jobs that do not end in time fail."""
        if not self.stop():
            return
        if self.lanes.error is None and not self.join(time.monotonic() + AT_CLOSE_S):
            self.lanes.break_(ExchangeError(CLOSED))
        if self.join(time.monotonic() + AT_CLOSE_S):
            has_left(self)
        self.drop()

    def stop(self) -> bool:
        """Take no more jobs, and let the threads end after those that are queued. False if that was done before."""
        with self._lock:
            first, self._closed = not self._closed, True
            for _ in self._threads if first else ():
                self._jobs.put(None)
        return first

    def join(self, until_s: float) -> bool:
        """Wait for the end of the threads, but not beyond that moment of `time.monotonic`. True if all have ended."""
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(timeout=max(0.0, until_s - time.monotonic()))
        until_s = min(until_s, time.monotonic() + DROP_S)
        for thread in self.lanes.dropping:
            thread.join(timeout=max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in (*others, *self.lanes.dropping))

    def drop(self) -> None:
        """Drop the groups, and fail what no thread will run any more."""
        self._end_all(self._error or ExchangeError(CLOSED))
        self.lanes.close()

    def _add_thread(self) -> None:
        """Holding the lock: start a thread, unless those that exist can take one more job."""
        self._unfinished += 1
        if len(self._threads) < min(self._unfinished, self.in_flight):
            thread = threading.Thread(target=self._work, name=f"gradwire-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _check_usable(self) -> None:
        check_usable(self._closed, self._error)

    def _work(self) -> None:
        scratch = Scratch(self.meter.memory)
        while (item := self._jobs.get()) is not None:
            ticket, job, pending = item
            try:
                with scratch.job():
                    self._run_one(ticket, job, pending)
            except BaseException as error:
                self._fail(error)
            else:
                self._settle(pending)
            del item, job, pending  # a waiting thread must not keep a bucket alive

    def _run_one(self, ticket: int, job: Job, pending: _Pending) -> None:
        if self._error is not None:
            raise self._error
        if is_profiled():
            job = profiled(job, f"{pending.what}, chunk {ticket - pending.first}")
        began = time.perf_counter()
        comm = self.lanes.comm(ticket)
        try:
            job(comm)
        except RuntimeError as error:
            used = (part.collective for part in (*comm.levels, comm) if part.collective)
            error.add_note(", ".join(text for text in (next(used, ""), pending.what) if text))
            raise
        ended = time.perf_counter()
        self.lanes.finish(ticket, comm)
        if pending.counted:
            self.meter.add(comm.traffic, began, ended)

    def _settle(self, pending: _Pending) -> None:
        with self._lock:
            self._unfinished -= 1
        if pending.end():
            with self._lock:
                self._open.discard(pending)

    def _fail(self, error: BaseException) -> None:
        """The first error ends everything: every waiting backward gets it, and the other ranks' lanes close."""
        _forget_frames(error)
        with self._lock:
            first, self._failing = not self._failing, True
        if not first:
            return  # the thread of the first error ends all that waits
        try:
            error = self._spread(error)
        finally:  # whatever happens, nobody waits for what will never come
            self._end_all(error)

    def _spread(self, error: BaseException) -> BaseException:
        """Tell the other ranks, or ask them if the error is theirs. The error that this rank's backward passes get."""
        if not _is_lost_connection(error):
            self.lanes.break_(error)
            return error
        if self.lanes.error is not None:  # this rank has closed the connections itself
            return self.lanes.error
        self.lanes.break_(ExchangeError("connection lost"))
        return self._explain(error)

    def _end_all(self, error: BaseException) -> None:
        """No job can be submitted from now on, and those that were have failed."""
        waiting: set[_Pending] = set()
        with self._lock:
            self._error = error
            waiting, self._open = self._open, waiting
        for pending in waiting:
            pending.end(error)

    def _explain(self, error: BaseException) -> ExchangeError:
        """Which rank is to blame for a lost connection, and what it said."""
        text, message = str(error).lower(), self.lanes.peer_error()
        missing = self.lanes.missing(0.0 if message else self.lanes.patience_s)
        who = " or ".join(f"rank {rank}" for rank in missing) or "another rank"
        if message := message or self.lanes.peer_error():
            reason = f"another rank failed ({message})"
        elif self.lanes.cut_off:
            reason = f"{who} did not come in time, nor did the store answer: rank {self.lanes.rank} seems to be cut off"
        elif "timed out" in text or CUT_OFF in text:
            reason = f"{who} did not come in time: it is slow or stuck, or did not run this backward pass"
            self.lanes.publish_error(reason)
        else:
            reason = f"another rank failed ({who} left no message: its process was killed or ended; look at its log)"
        where = " and ".join(filter(None, getattr(error, "__notes__", ())))
        cause = ExchangeError(f"{reason}; so rank {self.lanes.rank} stops too, in {where or 'a collective'} [{error}]")
        cause.__cause__ = error
        return cause


def _is_lost_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, LostConnection) or (
        isinstance(error, RuntimeError) and ("gloo" in text or CUT_OFF in text)
    )


def _forget_frames(error: BaseException) -> None:
    """Release what the failed calls held: a collective in a traceback would keep its connections open."""
    traceback.clear_frames(error.__traceback__)
    if error.__context__ is not None:
        _forget_frames(error.__context__)
