"""A load: a thread that computes as a backward pass does, and knows how much it has done.

A collective that runs beside it takes more from it than the processor time of the collective alone: on a core that
computes, each packet's work comes between, and caches are cold afterwards. Measured on one core, 660 kB each way at
1 Gbit/s take 0.7 ms of processor time by themselves and 1.2 ms from a matrix product beside them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ROWS, WIDTH = 32, 1024
"""Of a piece of work: a small batch times a matrix of 4 MB, half a millisecond."""
PIECES = 40
"""That are timed alone."""


class Load:
    """Of one process: ranks that are threads of it share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = self._pieces = 0
        self._thread: threading.Thread | None = None
        self._batch, self._matrix = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
        self._out = torch.empty(ROWS, WIDTH)
        self._piece_s = 0.0

    def calibrate(self) -> Load:
        """Find out what a piece of work takes alone, while this process does nothing else."""
        with self._lock:
            self._piece_s = self._alone_s()
        return self

    def taken_by(self, act: Callable[[], None], repeats: int) -> float:
        """Processor seconds that are gone after so many times `act` and that the load has not made use of."""
        with self._on():
            began_s, pieces = time.process_time(), self._pieces
            for _ in range(repeats):
                act()
            return time.process_time() - began_s - (self._pieces - pieces) * self._piece_s

    def _alone_s(self) -> float:
        """Processor seconds of a piece, all threads that work at it included."""
        for _ in range(PIECES // 4):
            self._work()
        began_s = time.process_time()
        for _ in range(PIECES):
            self._work()
        return (time.process_time() - began_s) / PIECES

    def _work(self) -> None:
        torch.mm(self._batch, self._matrix, out=self._out)

    @contextmanager
    def _on(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradwire-load", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                ended, self._thread = (None, self._thread) if self._users else (self._thread, None)
            if ended is not None:
                ended.join()

    def _run(self) -> None:
        while self._users:
            self._work()
            self._pieces += 1
