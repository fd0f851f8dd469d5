"""Starts the processes of a run, waits for them, and ends them all at an error, at Ctrl-C and when it is enough."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gradwire.tools.launch.local import ended_by_signals
from gradwire.tools.launch.plan import Plan
from gradwire.tools.launch.processes import end_all
from gradwire.tools.launch.script import ScriptFailed

TICK_S = 0.05
CAUSE_S = 1.0
"""After the first failure: how long to wait for a rank that knows more about it."""
GRACE_S = 0.8
"""How long processes may take to end by themselves, to save something for instance, before they are killed."""
RANK = "rank "
"""How the names of commands begin that are ranks; others start ranks of their own, and echo them."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start."""

    name: str
    """As messages call it: `rank 1`."""
    words: Sequence[str]
    env: Mapping[str, str]


def supervise(commands: Sequence[Command], plan: Plan, enough: Callable[[], bool] = lambda: False) -> None:
    """Run the commands to their end, or until `enough()`, which is asked every tick, is true.

    ScriptFailed if one of them fails: with the traceback of the rank that failed by itself, and its exit code. No
    process is left behind then, nor at Ctrl-C. Commands get a session of their own, so Ctrl-C reaches this one only.
    """
    running: list[subprocess.Popen[bytes]] = []
    ending = signal.SIGTERM
    with ended_by_signals():
        try:
            for command in commands:
                running.append(subprocess.Popen(command.words, env=command.env, start_new_session=True))
            _wait(running, commands, plan, enough)
        except KeyboardInterrupt:
            ending = signal.SIGINT
            raise
        finally:
            if any(process.poll() != 0 for process in running):
                with _signals_wait():
                    end_all(running, ending, GRACE_S)


def _wait(
    running: Sequence[subprocess.Popen[bytes]],
    commands: Sequence[Command],
    plan: Plan,
    enough: Callable[[], bool],
) -> None:
    while any(process.poll() is None for process in running) and not enough():
        if any(process.poll() for process in running):
            break
        time.sleep(TICK_S)
    if any(process.poll() for process in running):
        raise _failure(running, commands, plan)


def _failure(running: Sequence[subprocess.Popen[bytes]], commands: Sequence[Command], plan: Plan) -> ScriptFailed:
    """What to tell: an error of a rank's own, else a rank that ended without a word, else the first echo."""
    deadline = time.monotonic() + CAUSE_S
    while not _causes(plan) and time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(TICK_S)
    notes = sorted(plan.notes("failed"), key=lambda note: float(note["time_s"]))
    codes = {command.name: process.poll() or 0 for command, process in zip(commands, running, strict=True)}
    failed = {name: code for name, code in codes.items() if code}
    silent = {name: code for name, code in failed.items() if name not in {note["who"] for note in notes}}
    if notes and (_causes(plan) or not any(name.startswith(RANK) for name in silent)):
        return ScriptFailed(_tell(next(iter(_causes(plan)), notes[0])))
    name, code = next(iter((silent or failed).items()))
    return ScriptFailed(f"{name} {_ended(code)}", code if code > 0 else 128 - code)


def _causes(plan: Plan) -> list[dict[str, Any]]:
    own = [note for note in plan.notes("failed") if not note["echo"]]
    return sorted(own, key=lambda note: float(note["time_s"]))


def _tell(note: Mapping[str, Any]) -> str:
    """A traceback comes once: where a process has shown its own, its last line is enough."""
    if note["shown"]:
        return f"{note['who']} failed, see above: {note['traceback'].splitlines()[-1]}"
    return f"{note['who']} failed:\n{note['traceback']}"


def _ended(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


@contextmanager
def _signals_wait() -> Iterator[None]:
    """A signal that comes while processes are being ended must not keep us from that, nor get lost: it acts after."""
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
