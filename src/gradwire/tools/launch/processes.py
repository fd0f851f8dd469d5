"""Everything below a set of processes: found in /proc, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

TICK_S = 0.02

Identity = tuple[int, int]
"""Process id and start time: ids are used again."""


def end_all(roots: Sequence[subprocess.Popen[bytes]], first: signal.Signals, grace_s: float) -> None:
    """Send the roots a signal they may act on; whatever lives after `grace_s`, they and all below, is killed."""
    seen = below(root.pid for root in roots)
    for root in roots:
        root.send_signal(first)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(root.poll() is None for root in roots):
        time.sleep(TICK_S)
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
    """Id -> parent, session, start time."""
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
