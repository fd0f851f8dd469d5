"""How crowded the cores are: how much longer work takes because its threads wait for a core.

Ranks that share cores with each other, or with other programs, compute for a part of the time only. Linux counts for
every thread how long it has run and how long it was ready to run, but had no core. Their ratio says how long a second
of work takes here, whoever uses the cores, and it does not count what waits for data or for the network.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")


def run_and_wait_s() -> tuple[float, float]:
    """Seconds that the threads of this process have run, and have waited for a core; zeros where that is unknown."""
    run_ns = wait_ns = 0
    for path in TASKS.glob("*/schedstat"):
        with suppress(OSError):  # a thread that ends
            run, wait, _ = map(int, path.read_text().split())
            run_ns, wait_ns = run_ns + run, wait_ns + wait
    return run_ns / 1e9, wait_ns / 1e9


class Crowd:
    """Measured over spans in which all ranks compute and none communicates."""

    def __init__(self) -> None:
        self._run_s = self._wait_s = 0.0
        self._since: tuple[float, float] | None = None

    def begin(self) -> None:
        """A span begins."""
        self._since = run_and_wait_s()

    def end(self) -> None:
        """It is over."""
        if self._since is not None:
            run_s, wait_s = run_and_wait_s()
            self._run_s += max(run_s - self._since[0], 0.0)
            self._wait_s += max(wait_s - self._since[1], 0.0)
            self._since = None

    @property
    def factor(self) -> float:
        """How many times as long work takes as on cores that nobody else uses; 1 if nothing is known."""
        return 1 + self._wait_s / self._run_s if self._run_s > 0 else 1.0
