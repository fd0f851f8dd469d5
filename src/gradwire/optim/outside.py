"""What ranks that may fail need outside of themselves: a store that no rank hosts, and a way to see that one is gone.

A call to torch's TCPStore waits for ever if the store's host vanishes without closing the connection. Every call here
ends in time: it runs in a thread of its own, which is left behind if the call does not return.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

from gradwire._torch import PrefixStore, Store, TCPStore
from gradwire.errors import ExchangeError, RegisterError

KNOCK_S = 0.2
"""How long a connection to a living process may take. One that takes longer tells nothing."""
BACKLOG = 128
PROBE_S = 0.25
"""How often a waiting rank looks whether the others still exist."""

T = TypeVar("T")


_left_behind: list[threading.Thread] = []


def in_time(call: Callable[[], T], timeout_s: float, late: str, stop: Callable[[], bool] = lambda: False) -> T:
    """The result of a call. Raises ExchangeError with the text `late`, and leaves the call behind, if it takes longer,
    or if `stop`, which is asked now and then, says that it is in vain.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread, until_s = threading.Thread(target=run, name="outside", daemon=True), time.monotonic() + timeout_s
    thread.start()
    thread.join(min(PROBE_S, timeout_s))
    while thread.is_alive() and time.monotonic() < until_s and not stop():
        thread.join(PROBE_S)
    if errors:
        raise errors[0]
    if not results:
        _left_behind.append(thread)
        raise ExchangeError(late)
    return results[0]


def leave_behind(call: Callable[[], object]) -> None:
    """Run a call that may take long in a thread of its own."""
    _left_behind[:] = [thread for thread in _left_behind if thread.is_alive()]
    thread = threading.Thread(target=call, name="outside", daemon=True)
    thread.start()
    _left_behind.append(thread)


def wait_for_left_behind(timeout_s: float) -> None:
    """At the end: a process must not exit while a thread is inside torch."""
    until_s = time.monotonic() + timeout_s
    while _left_behind:
        _left_behind.pop().join(max(0.0, until_s - time.monotonic()))


class OutsideStore:
    """A client of the store of one job. Every method raises ExchangeError if the store does not answer in time."""

    def __init__(self, host: str, port: int, job: str, timeout_s: float) -> None:
        self.address, self._timeout_s = f"{host}:{port}", timeout_s
        try:
            socket.create_connection((host, port), timeout_s).close()  # torch would print its stack
            self._new = lambda: self._client(host, port, job)
            self._store = self._ask(self._new)
        except (OSError, RuntimeError) as error:
            raise RegisterError(
                f"there is no store at {self.address} [{_line(error)}]; start one with 'gradwire store --port {port}' "
                "on that host, and make sure that this rank can reach it"
            ) from error

    def for_group(self) -> Store:
        """A client of its own for a group of ranks. A call that is left behind keeps its client until its time is up,
        so that neither calls here nor the next group may use the same one.
        """
        return self._ask(self._new)

    def _client(self, host: str, port: int, job: str) -> Store:
        limit = timedelta(seconds=self._timeout_s)
        client = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        return PrefixStore(f"gradwire/{job}", client)

    def _ask(self, call: Callable[[], T]) -> T:
        lost = f"the store at {self.address} does not answer; without it the ranks cannot agree on who is left"
        try:
            return in_time(call, self._timeout_s, f"{lost} (waited {self._timeout_s:g} s)")
        except ExchangeError:
            raise
        except RuntimeError as error:
            raise ExchangeError(f"{lost} [{_line(error)}]") from error

    def set(self, key: str, text: str) -> None:
        """Write."""
        self._ask(lambda: self._store.set(key, text))

    def find(self, key: str) -> str | None:
        """Read; None if nobody has written it."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def found(self, keys: list[str]) -> list[bool]:
        """Which of the keys somebody has written."""
        return self._ask(lambda: [self._store.check([key]) for key in keys])

    def claim(self, key: str, text: str) -> str:
        """Write unless somebody has; what is written then, the same for all who ask."""
        return self._ask(lambda: self._store.compare_set(key, "", text).decode())

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; its new value."""
        return self._ask(lambda: self._store.add(key, amount))

    def drop(self, *keys: str) -> None:
        """Forget keys."""
        self._ask(lambda: [self._store.delete_key(key) for key in keys])


def _line(error: Exception) -> str:
    """What an error says, without torch's stack."""
    return str(error).split("\n", 1)[0]


class Door:
    """A port that nobody serves, by which others see that this process exists.

    The kernel accepts connections to it as long as the process lives, even if it is stopped, and refuses them
    afterwards. Nothing is read from it.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """`host` and `port` are those of the store: the others reach this process by the way that leads there."""
        with socket.create_connection((host, port), timeout_s) as towards:
            ip, family = towards.getsockname()[0], towards.family
        self._socket = socket.create_server((ip, 0), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._close = weakref.finalize(self, self._socket.close)
        self.address = f"{ip} {self._socket.getsockname()[1]} {platform.node()}"
        # A forked process, such as a worker of a DataLoader, would keep the port open after this one has died.
        os.register_at_fork(after_in_child=partial(_shut, weakref.ref(self)))

    def clear(self) -> None:
        """Drop the connections that others have made, before there are too many."""
        with suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """From now on this process counts as gone."""
        self._close()


def _shut(door: weakref.ref[Door]) -> None:
    if (alive := door()) is not None:
        alive.close()


def is_gone(address: str) -> bool:
    """Whether the process behind a door has ended for certain. False if it lives, or cannot be reached."""
    ip, port, node = address.split(" ", 2)
    if (ip.startswith("127.") or ip == "::1") and node != platform.node():
        return False  # another host's own address means nothing here
    try:
        socket.create_connection((ip, int(port)), KNOCK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
