"""Ranks that are forked from a process with torch loaded, for verbs that start a script many times.

A new interpreter spends seconds on importing torch; a fork takes milliseconds. The server is started like a rank, with
the flags and the environment of one (`rank.py --fork-server MODULES`). It imports the modules, runs nothing, and has
no threads, so that a forked process is like a new one. It reads a line of JSON for every process to fork, and answers
with lines of JSON:

    {"words": ["train.py"], "env": {...}, "log": "/tmp/..."}  ->  {"pid": 123}
                                            when it has ended  ->  {"ended": 123, "code": 0}
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError
from gradwire.tools.launch.plan import PARENT

POLL_S = 0.02
GONE = "the process that ranks are forked from has ended; its error is above, if it had one"


class ForkServer:
    """The server, as seen by the process that starts ranks."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        """`words` is the command line of the server."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout.fileno()
        self._rest = b""
        self._started: list[int] = []
        self._ended: dict[int, int] = {}

    def start(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        """Fork a process that runs `words`, as `rank.py` takes them."""
        order = {"words": list(words), "env": dict(env), "log": str(log)}
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            raise GradwireError(GONE) from None
        while not self._started:
            self._read()
        return Forked(self._started.pop(), self)

    def exit_code(self, pid: int, *, wait: bool = False) -> int | None:
        """How a process has ended; None if it still runs."""
        while pid not in self._ended and (wait or select.select([self._answers], [], [], 0)[0]):
            self._read()
        return self._ended.get(pid)

    def close(self) -> None:
        """End the server. Processes that still run end with it."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> None:
        """Wait for answers, and take in all that are there."""
        got = os.read(self._answers, 1 << 16)
        if not got:
            raise GradwireError(GONE)
        *lines, self._rest = (self._rest + got).split(b"\n")
        for answer in map(json.loads, lines):
            if "ended" in answer:
                self._ended[answer["ended"]] = answer["code"]
            else:
                self._started.append(answer["pid"])


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that the supervisor uses."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._server.exit_code(self.pid)

    def wait(self) -> int:
        """The exit code, when it has ended."""
        code = self._server.exit_code(self.pid, wait=True)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


# -- in the server -----------------------------------------------------------------------------------------------------


def serve(modules: Sequence[str]) -> list[str]:
    """Fork a process for every line on stdin. Returns in each forked process, with the words that it has to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    server, rest, answers = os.getpid(), b"", os.dup(1)
    while True:
        _reap(answers)
        if not select.select([0], [], [], POLL_S)[0]:
            continue
        got = os.read(0, 1 << 16)
        if not got:
            os._exit(0)
        *lines, rest = (rest + got).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if (pid := os.fork()) == 0:
                os.close(answers)
                return _become(order, server)
            os.write(answers, json.dumps({"pid": pid}).encode() + b"\n")


def _reap(answers: int) -> None:
    """Report the processes that have ended."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            os.write(answers, json.dumps({"ended": pid, "code": code}).encode() + b"\n")


def _become(order: Mapping[str, Any], server: int) -> list[str]:
    """Make this forked process look like a new one."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["env"])
    os.environ[PARENT] = str(server)
    sources = (os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    for target, source in ((0, sources[0]), (1, sources[1]), (2, sources[1])):
        os.dup2(source, target)
    words: list[str] = order["words"]
    sys.argv[1:] = words
    return words
