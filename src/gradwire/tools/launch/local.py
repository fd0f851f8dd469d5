"""Starts ranks as processes, hears from them, and ends them: at an error, at Ctrl-C, and when this process dies.

How a rank is tied to the process that started it:

1. `python -m gradwire.tools.launch.local_rank` reads one line of JSON from its stdin: who it is and what to run.
2. Its stdout carries messages, a line of JSON each; all it prints otherwise goes to a file, shown if it dies.
3. Its stdin stays open. When that ends the starting process is gone, however it went, and the rank exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gradwire.errors import GradwireError, SpecError

TICK_S = 0.1
"""The longest that nothing is reported."""
GRACE_S = 1.0
"""After the first failure: how long to listen for a rank that knows more about it."""
EXIT_S = 5.0
"""How long a rank that has said everything may take to exit."""
RANKS_PER_CORE = 4
MIN_LIMIT = 8
"""So many ranks may share even the smallest machine."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}
"""For every rank: glibc's own habit depends on what was freed before, and moves a step by 10% either way."""

Report = Callable[[float, str], None]


class RankFailed(GradwireError, RuntimeError):
    """A rank raised or died; the text holds its traceback, or the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Message:
    """From a rank. `kind` is report, result, failed, or ended (its stdout has)."""

    rank: int
    kind: str
    content: Any = None


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(nproc: int) -> int:
    """How many threads each of `nproc` ranks computes with."""
    return max(1, cores() // nproc)


def check_nproc(nproc: int) -> None:
    """SpecError for a number of local ranks that makes no sense on this machine."""
    limit = max(MIN_LIMIT, RANKS_PER_CORE * cores())
    if not 1 <= nproc <= limit:
        raise SpecError(
            f"the number of ranks must be between 1 and {limit} on a machine with {cores()} cores, got {nproc}"
        )


def run_ranks(
    target: str,
    nproc: int,
    job: Mapping[str, Any],
    *,
    report: Report = lambda part, doing: None,
    timeout_s: float = 60.0,
    prefixes: Sequence[Sequence[str]] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `target` ("module:function") as `function(rank, nproc, job, report)` in `nproc` processes of a gloo world.

    Returns what they returned, in the order of the ranks. `job` and the results must be JSON. What rank 0 reports comes
    out of `report`, again every tick. `prefixes` go before the ranks' command lines, such as `ip netns exec host0`.
    No process is left behind, whatever happens. SpecError for more ranks than make sense here.
    """
    check_nproc(nproc)
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder, ended_by_signals():
        ranks = _Ranks(Path(folder), {**os.environ, **_environment(nproc), **(env or {})})
        try:
            for rank in range(nproc):
                order = {"target": target, "rank": rank, "size": nproc, "folder": folder, "timeout_s": timeout_s}
                ranks.start(rank, prefixes[rank] if prefixes else (), {**order, "job": job})
            return ranks.listen(report)
        finally:
            ranks.kill()


def _environment(nproc: int) -> dict[str, str]:
    """The ranks share the cores, and find the modules that this process finds."""
    return {
        "OMP_NUM_THREADS": str(threads_each(nproc)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **KEEP_MEMORY,
    }


class _Ranks:
    """The processes, and what they say."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder, self._env = folder, env
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._messages: queue.Queue[Message] = queue.Queue()

    def start(self, rank: int, prefix: Sequence[str], order: Mapping[str, Any]) -> None:
        """Start one and give it its order."""
        command = [*prefix, sys.executable, "-P", "-m", "gradwire.tools.launch.local_rank"]
        with self._log(rank).open("w") as log:
            process = subprocess.Popen(
                command, env=self._env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self._processes.append(process)
        self._readers.append(threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True))
        self._readers[-1].start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: `listen` says why
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()

    def listen(self, report: Report) -> list[Any]:
        """Pass reports on until all ranks have ended; their results, or RankFailed."""
        results: dict[int, Any] = {}
        ended, last = 0, (0.0, f"starting {len(self._processes)} processes")
        while ended < len(self._processes):
            message = self._next(TICK_S)
            if message is None or message.kind == "report":
                last = last if message is None else (message.content["part"], message.content["doing"])
                report(*last)
            elif message.kind == "result":
                results[message.rank] = message.content
            elif message.kind == "ended" and message.rank in results and self._exit_code(message.rank) == 0:
                ended += 1
            else:
                raise RankFailed(self._explain(message))
        return [results[rank] for rank in sorted(results)]

    def kill(self) -> None:
        """End every process that still runs, and wait until it has."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        for reader in self._readers:
            reader.join()

    def _read(self, rank: int, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._messages.put(Message(rank, **json.loads(line)))
        self._messages.put(Message(rank, "ended"))

    def _next(self, timeout_s: float) -> Message | None:
        try:
            return self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _explain(self, first: Message) -> str:
        """Of the failures within a short time the one that is not just the echo of another."""
        failures, deadline = [first], time.monotonic() + GRACE_S
        while not _causes(failures) and (left := deadline - time.monotonic()) > 0:
            message = self._next(left)
            if message is not None and message.kind in ("failed", "ended"):
                failures.append(message)
        return self._tell([*_causes(failures), first][0])

    def _tell(self, failure: Message) -> str:
        if failure.kind == "failed":
            return f"rank {failure.rank} failed:\n{failure.content['traceback'].rstrip()}"
        code = self._exit_code(failure.rank)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended early with exit code {code}"
        printed = self._log(failure.rank).read_text(errors="replace").strip()
        tail = "\n".join(printed.splitlines()[-20:])
        return f"rank {failure.rank} {how}" + (f"; its last words:\n{tail}" if tail else " and printed nothing")

    def _exit_code(self, rank: int) -> int:
        """Of a rank whose stdout has ended. One that hangs while it exits is helped."""
        try:
            return self._processes[rank].wait(timeout=EXIT_S)
        except subprocess.TimeoutExpired:
            self._processes[rank].kill()
            return self._processes[rank].wait()

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def _causes(failures: list[Message]) -> list[Message]:
    """Those that say what went wrong, not that another rank is gone: an error of its own, or an end without a word."""
    spoke = {failure.rank for failure in failures if failure.kind == "failed"}
    return [
        failure
        for failure in failures
        if (not failure.content["echo"] if failure.kind == "failed" else failure.rank not in spoke)
    ]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process the way Ctrl-C does: through its `finally` clauses."""
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup stays nohup
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + number)
