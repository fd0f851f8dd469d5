"""Load: a thread that computes as a backward pass does, and counts how much it has done.

A collective that runs beside it costs more CPU time than the collective alone: on a core that computes, each packet
interrupts the computation, and caches are cold afterwards. Measured on one core, 660 kB each way at 1 Gbit/s take 0.7
ms of CPU time by themselves, and 1.2 ms from a matrix product beside them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ROWS, WIDTH = 32, 1024
"""The shape of a piece of work: a small batch times a matrix of 4 MB, which takes half a millisecond."""
PIECES = 40
"""The number of pieces that are timed alone."""


class Load:
    """The load of one process: ranks that are threads of it share one."""

    def __init__(self, cpu_time: Callable[[], float] = time.process_time) -> None:
        self._cpu_time = cpu_time
        self._lock = threading.Lock()
        self._users = self._pieces = 0
        self._thread: threading.Thread | None = None
        self._batch, self._matrix = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
        self._out = torch.empty(ROWS, WIDTH)
        self._piece_s = 0.0

    def calibrate(self) -> Load:
        """Measure a piece of work alone, while this process does nothing else."""
        with self._lock:
            self._piece_s = self._alone_s()
        return self

    def taken_by(self, act: Callable[[], None], repeats: int) -> float:
        """CPU seconds that `repeats` calls of `act` take in this process, beyond what the load has used."""
        with self._on():
            began_s, pieces = self._cpu_time(), self._pieces
            for _ in range(repeats):
                act()
            return self._cpu_time() - began_s - (self._pieces - pieces) * self._piece_s

    def _alone_s(self) -> float:
        """CPU seconds of a piece, in all threads that work at it."""
        for _ in range(PIECES // 4):
            self._work()
        began_s = self._cpu_time()
        for _ in range(PIECES):
            self._work()
        return (self._cpu_time() - began_s) / PIECES

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
