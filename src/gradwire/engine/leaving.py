"""Leaving: at the end of a process, its threads end before the interpreter does.

A thread that comes back from torch to an interpreter that no longer exists aborts the process ("terminate called
without an active exception"). Engine threads come back when their collective ends, and gloo's own threads need the
interpreter to release its tensors. So at exit:

1. Queued jobs may end. Usually there are none, and this takes no time.
2. If jobs still wait for other ranks after a while, this rank tells the others that it leaves, and closes its
   connections. The jobs fail at once.
3. When all threads have ended, the groups are dropped, which ends the threads of gloo.

This is done for all engines together, as a job of one may wait for the result of another.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Iterable
from typing import Protocol

from gradwire.engine.lanes import SURVIVORS_S, Lanes
from gradwire.errors import ExchangeError

JOBS_S = 5
"""How long the other ranks may take to come to a collective that this rank has begun."""
THREADS_S = 20
"""How long threads may take to end once their collectives have failed. They do that at once, unless they run a function
of the user's."""
LEFT = "its process ended in the middle of a step"


class Leaver(Protocol):
    """A runner with threads."""

    lanes: Lanes
    process: int
    """The process that has the threads. A fork of it has none."""

    def stop(self) -> bool:
        """Take no more jobs, and let the threads end after those that are queued."""

    def join(self, until_s: float) -> bool:
        """Wait for the end of the threads, but not beyond that moment of `time.monotonic`. True if all have ended."""

    def drop(self) -> None:
        """Drop the groups."""


_leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()
_registered_in = 0


def leave_at_exit(runner: Leaver) -> None:
    """End the threads of this runner at the end of the process, if it still exists then."""
    global _registered_in
    _leavers.add(runner)
    if _registered_in != os.getpid():  # a fork may have forgotten its exit handlers
        _registered_in = os.getpid()
        atexit.register(_leave)


def has_left(runner: Leaver) -> None:
    """Nothing is left to do for this runner at the end of the process."""
    _leavers.discard(runner)


def _leave() -> None:
    """The steps above. If an error of the user's code ends the process, the other ranks learn which."""
    own = [runner for runner in _leavers if runner.process == os.getpid()]
    if (error := getattr(sys, "last_value", None)) is not None:
        _give_up(own, error)
    for runner in own:
        runner.stop()
    until_s = time.monotonic() + JOBS_S
    _give_up([runner for runner in own if not runner.join(until_s)], None)
    until_s = time.monotonic() + THREADS_S
    for runner in own:
        if runner.join(until_s):
            runner.drop()


def _give_up(runners: Iterable[Leaver], error: BaseException | None) -> None:
    """Tell the other ranks of this error, or that this rank leaves, and close the connections."""
    told = [runner.lanes for runner in runners if runner.lanes.error is None]
    for lanes in told:
        if error is None:
            lanes.publish_error(LEFT)
        lanes.break_(error or ExchangeError(LEFT))
    for lanes in told:
        lanes.missing(SURVIVORS_S)  # the store may end with this process: let the others read it first
