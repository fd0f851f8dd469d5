"""The supervisor: starts the processes of a run, waits for them, and ends them all, whatever happens.

It ends them at an error, at Ctrl-C, at SIGTERM, and when the caller has enough. If this process is killed, its ranks
end by themselves (`rank.end_with_parent`).
"""

import os
import signal
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError
from gradwire.tools.launch.forked import Forked, ForkServer
from gradwire.tools.launch.plan import Notes

TICK_S = 0.05
CAUSE_S = 1.0
"""After the first failure: how long to wait for a rank that knows the cause."""
GRACE_S = 0.8
"""How long processes may take to end by themselves, for instance to save something, before they are killed."""
RANK = "rank "
"""The names of commands that are ranks begin with this; other commands start ranks of their own."""
TAIL_LINES = 20
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Started = subprocess.Popen[bytes] | Forked
Identity = tuple[int, int]
"""Process id and start time: the system uses ids again."""


class RunFailed(GradwireError, RuntimeError):
    """A process of the run failed. `exit_code` is its exit code; an empty text means that it has shown the error."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start."""

    name: str
    """As messages call it: `rank 1`."""
    words: Sequence[str]
    env: Mapping[str, str]
    log: Path | None = None
    """Where its output goes; None: where the output of this process goes."""
    server: ForkServer | None = None
    """What forks it, given the words after `-m` and the module; None: it is a new interpreter. It needs a log."""

    def start(self) -> Started:
        """Start it in a session of its own, so that Ctrl-C reaches this process only."""
        if self.server is not None:
            assert self.log is not None
            return self.server.start(self.words, self.env, self.log)
        if self.log is None:
            return subprocess.Popen(self.words, env=self.env, start_new_session=True)
        with self.log.open("wb") as log:
            outputs: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.Popen(self.words, env=self.env, start_new_session=True, **outputs)

    def how_it_ended(self, code: int) -> str:
        """In words, with the end of its output if that has not been shown."""
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        tail = "" if self.log is None else self.log.read_text(errors="replace").strip()
        shown = "\n".join(tail.splitlines()[-TAIL_LINES:])
        return f"{self.name} {how}" + (f"; the end of its output:\n{shown}" if shown else "")


def supervise(commands: Sequence[Command], notes: Notes, enough: Callable[[], bool] = lambda: False) -> None:
    """Run the commands to their end, or until `enough()`, which is called at every tick, returns True.

    Raises:
        RunFailed: A command failed. The text holds the traceback of the rank that caused it, once. No process is left
            behind then, nor at Ctrl-C.
    """
    running: list[Started] = []
    ending = signal.SIGTERM
    with ended_by_signals():
        try:
            running.extend(command.start() for command in commands)
            _wait(running, commands, notes, enough)
        except KeyboardInterrupt:
            ending = signal.SIGINT
            raise
        finally:
            if any(process.poll() != 0 for process in running):
                with _signals_wait():
                    end_all(running, ending, GRACE_S)


def _wait(running: Sequence[Started], commands: Sequence[Command], notes: Notes, enough: Callable[[], bool]) -> None:
    while any(process.poll() is None for process in running) and not enough():
        if any(process.poll() for process in running):
            break
        time.sleep(TICK_S)
    if any(process.poll() for process in running):
        raise _failure(running, commands, notes)


# -- which failure to report -------------------------------------------------------------------------------------------


def _failure(running: Sequence[Started], commands: Sequence[Command], notes: Notes) -> RunFailed:
    """The cause: a rank's own error, else a rank that ended without a note, else the first error that names another."""
    deadline = time.monotonic() + CAUSE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        if _causes(notes) or _silent(running, commands, notes):
            break
        time.sleep(TICK_S)
    failed, silent = _failed(running), _silent(running, commands, notes)
    reported = sorted(notes.read("failed"), key=_time_s)
    if reported and (_causes(notes) or not silent):
        return RunFailed(_describe(next(iter(_causes(notes)), reported[0])))
    command, code = next(iter((silent or failed).items()))
    return RunFailed(commands[command].how_it_ended(code), code if code > 0 else 128 - code)


def _causes(notes: Notes) -> list[dict[str, Any]]:
    """Errors of a rank's own, the first one first."""
    return sorted((note for note in notes.read("failed") if not note["echo"]), key=_time_s)


def _failed(running: Sequence[Started]) -> dict[int, int]:
    """The exit codes of the commands that failed, by their index."""
    return {at: code for at, process in enumerate(running) if (code := process.poll())}


def _silent(running: Sequence[Started], commands: Sequence[Command], notes: Notes) -> dict[int, int]:
    """The same for ranks that left no note: they were killed, or left without an error of Python."""
    noted = {note["who"] for note in notes.read("failed")}
    ranks = {at for at, command in enumerate(commands) if command.name.startswith(RANK) and command.name not in noted}
    return {at: code for at, code in _failed(running).items() if at in ranks}


def _time_s(note: Mapping[str, Any]) -> float:
    return float(note["time_s"])


def _describe(note: Mapping[str, Any]) -> str:
    """A traceback is shown once: where a process has shown its own, the last line is enough."""
    if note["shown"]:
        return f"{note['who']} failed, see above: {note['traceback'].splitlines()[-1]}"
    return f"{note['who']} failed:\n{note['traceback']}"


# -- signals -----------------------------------------------------------------------------------------------------------


@contextmanager
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


@contextmanager
def _signals_wait() -> Iterator[None]:
    """A signal that arrives while processes are being ended must neither prevent that nor get lost: it acts after."""
    came: list[int] = []
    numbers = ENDING if threading.current_thread() is threading.main_thread() else ()
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)


# -- ending processes --------------------------------------------------------------------------------------------------


def end_all(roots: Sequence[Started], first: signal.Signals, grace_s: float) -> None:
    """Send the roots a signal they may act on. After `grace_s`, kill them and all processes below that still run."""
    seen = below(root.pid for root in roots)
    for root in roots:
        root.send_signal(first)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(root.poll() is None for root in roots):
        time.sleep(TICK_S / 2)
    for identity in seen | below(root.pid for root in roots):
        _kill(identity)
    for root in roots:
        root.kill()
        root.wait()


def below(roots: Iterable[int]) -> set[Identity]:
    """All processes that descend from `roots`, and those in a session that one of them leads. Empty without /proc."""
    table = dict(filter(None, map(_status, Path("/proc").glob("[0-9]*/stat"))))
    found, wave = set[int](), set(roots)
    leaders = frozenset(wave)
    while wave:
        found |= wave
        wave = {pid for pid, (parent, session, _) in table.items() if parent in wave or session in leaders} - found
    return {(pid, table[pid][2]) for pid in found if pid in table}


def _status(path: Path) -> tuple[int, tuple[int, int, int]] | None:
    """Process id -> parent, session, start time."""
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    return int(path.parent.name), (int(fields[1]), int(fields[3]), int(fields[19]))


def _kill(identity: Identity) -> None:
    pid, start = identity
    status = _status(Path(f"/proc/{pid}/stat"))
    if status is not None and status[1][2] == start:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
