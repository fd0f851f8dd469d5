"""Step 9: runs exchanges beside the backward pass, in order, and hands DDP a Future.

`LaneRunner` uses a few threads, for backends that block the host. A job holds a thread from its first encoding to its
last decoding; while one waits for the wire the others encode and decode, which is the whole pipeline. Where nothing
blocks the host, see `stream.py`.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Comm, Levels, Traffic
from gradwire.errors import CLOSED, ExchangeError
from gradwire.gloo import THREADS
from gradwire.lanes import Lanes
from gradwire.scratch import Scratch

Job = Callable[[Comm], None]
Report = Callable[[Traffic, float, float], None]
"""Told after each job: its traffic, and when it began and ended (`time.perf_counter`)."""

KICK_S = 0.005
"""An idle wire is worth this much of the backward thread's time: on a busy core, a worker it has just woken would get
neither the GIL nor the core before a whole time slice has passed."""
CUT_OFF = "application timeout caused pair closure"
"""What gloo says, without its name, to those who wait on a connection that another waiter's time limit closed."""
LEFT_NO_WORD = "it left no word, so it was probably killed; look at the other ranks' logs"
AT_CLOSE_S = 20
AT_EXIT_S = 1
"""How long threads may take to end what is queued. A process must not leave while one is inside torch: the thread would
come back to an interpreter that is gone, and abort the process."""


class Runner(Protocol):
    """Runs jobs in the order of submission, the same on every rank."""

    def open(self, lanes: int) -> None:
        """Get ready for jobs of up to `lanes` collectives. All ranks together."""

    def split(self, levels: Levels | None) -> None:
        """Get ready for jobs of two levels, or of one. All ranks together."""

    def submit(
        self, jobs: Sequence[Job], result: Tensor, report: Report, after: Callable[[], None] | None = None
    ) -> Future[Tensor]:
        """Run `jobs`, then `after`, and complete the future with `result`."""

    def run(self, job: Job) -> None:
        """Run one job and wait for it."""

    def close(self) -> None:
        """End threads and groups. Submitting afterwards is an error."""


class _Pending:
    """A future for several jobs. Its value comes out of a callback: the only way for an error to reach DDP whole."""

    def __init__(self, jobs: int, result: Tensor, after: Callable[[], None] | None) -> None:
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

    def __init__(self, lanes: Lanes, threads: int = THREADS) -> None:
        self.lanes = lanes
        self._jobs: queue.SimpleQueue[tuple[int, Job, _Pending, Report] | None] = queue.SimpleQueue()
        self._open: set[_Pending] = set()
        self._lock = threading.Lock()
        self._next_ticket = 0
        self._error: BaseException | None = None
        self._closed = False
        self._most, self._threads = threads, list[threading.Thread]()
        self._unfinished = 0
        self._at_exit = weakref.finalize(self, _leave, self._jobs, self._threads, lanes)

    def open(self, lanes: int) -> None:
        """Make the lanes that are missing; no job may be under way."""
        self.lanes.open(lanes, self._next_ticket)

    def split(self, levels: Levels | None) -> None:
        """Use lanes of two levels, or of one, from now on; no job may be under way."""
        self.lanes.split(levels, self._next_ticket)

    def submit(
        self, jobs: Sequence[Job], result: Tensor, report: Report, after: Callable[[], None] | None = None
    ) -> Future[Tensor]:
        """Queue the jobs under the next tickets. `after` runs in the thread that ends the last one."""
        self._check_usable()
        pending, first = _Pending(len(jobs), result, after), self._next_ticket
        with self._lock:
            idle = not self._open
            self._open.add(pending)
        for job in jobs:
            self._add_thread()
            self._jobs.put((self._next_ticket, job, pending, report))
            self._next_ticket += 1
        if idle:
            self.lanes.wait_started(first, KICK_S)
        return pending.future

    def run(self, job: Job) -> None:
        """Run one job in its turn and wait; its error comes out as it is."""
        self._check_usable()
        try:
            self.submit([job], torch.empty(0), lambda *_: None).wait()
        except RuntimeError:
            raise self._error or ExchangeError("the hook was closed meanwhile") from None

    def close(self) -> None:
        """Let queued jobs end, then stop the threads and drop the groups."""
        if self._closed:
            return
        self._closed = True
        self._at_exit.detach()
        _stop(self._jobs, self._threads, AT_CLOSE_S)
        self.lanes.close()

    def _add_thread(self) -> None:
        """Unless those that are there can take up one more job."""
        with self._lock:
            self._unfinished += 1
            needed = len(self._threads) < min(self._unfinished, self._most)
        if needed:
            thread = threading.Thread(target=self._work, name=f"gradwire-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _check_usable(self) -> None:
        if self._closed:
            raise ExchangeError(CLOSED)
        if self._error is not None:
            told = f"{type(self._error).__name__}: {self._error}"
            raise ExchangeError(f"this hook stopped at an earlier error: {told}") from self._error

    def _work(self) -> None:
        scratch = Scratch()
        while (item := self._jobs.get()) is not None:
            ticket, job, pending, report = item
            try:
                with scratch.job():
                    self._run_one(ticket, job, report)
            except BaseException as error:
                self._fail(error)
            else:
                self._settle(pending)
            del item, job, pending, report  # a waiting thread must not keep a bucket alive

    def _run_one(self, ticket: int, job: Job, report: Report) -> None:
        if self._error is not None:
            raise self._error
        began = time.perf_counter()
        comm = self.lanes.comm(ticket)
        job(comm)
        ended = time.perf_counter()
        self.lanes.finish(ticket, comm)
        report(comm.traffic, began, ended)

    def _settle(self, pending: _Pending) -> None:
        with self._lock:
            self._unfinished -= 1
        if pending.end():
            with self._lock:
                self._open.discard(pending)

    def _fail(self, error: BaseException) -> None:
        """The first error ends everything: every waiting backward gets it, and the other ranks' lanes close."""
        _forget_frames(error)
        if self._error is None:
            self._error = error = self._explain(error)
            self.lanes.break_(error)
        with self._lock:
            waiting, self._open = self._open, set()
        for pending in waiting:
            pending.end(self._error)

    def _explain(self, error: BaseException) -> BaseException:
        """A connection that closed is another rank's doing: say whose, if it left word."""
        text = str(error).lower()
        if not isinstance(error, RuntimeError) or not ("gloo" in text or CUT_OFF in text):
            return error
        blame = self.lanes.blame()
        if not blame and ("timed out" in text or CUT_OFF in text):
            told = "no other rank came in time: one is slow or stuck, or did not run this backward pass"
            self.lanes.say(told)
        else:
            told = f"another rank failed ({blame or LEFT_NO_WORD})"
        cause = ExchangeError(f"{told}; so rank {self.lanes.rank} stops too [{error}]")
        cause.__cause__ = error
        return cause


def _stop(jobs: queue.SimpleQueue[Any], threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Let queued jobs end, then the threads, but do not wait longer than that."""
    for _ in threads:
        jobs.put(None)
    until_s = time.monotonic() + timeout_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=max(0.0, until_s - time.monotonic()))


def _leave(jobs: queue.SimpleQueue[Any], threads: Sequence[threading.Thread], lanes: Lanes) -> None:
    """At the end of the process. Closing lanes ends gloo's threads: what they let go of may need the interpreter."""
    _stop(jobs, threads, AT_EXIT_S)
    if not any(thread.is_alive() for thread in threads):
        lanes.close()


def _forget_frames(error: BaseException) -> None:
    """Let go of what the failed calls held: a collective in a traceback would keep its connections open."""
    traceback.clear_frames(error.__traceback__)
    if error.__context__ is not None:
        _forget_frames(error.__context__)
