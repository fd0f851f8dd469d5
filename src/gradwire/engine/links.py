"""Links: connections of a lane's own, which gathers and all-to-alls use instead of gloo's.

A collective over gloo passes through gloo's thread and often one of torch's. Where a rank has one core, gloo's thread
polls while another one holds the lock of its connection, and each hand-over costs a wait for the core. Here a job sends
and receives by itself:

1. It sends what the connections take at once. A thread of the lane sends the rest, in the order of the collectives.
2. It receives in its turn, straight into its tensor. Turns come in the order of the collectives, so a connection
   carries neither tags nor sizes: both ranks know them.
3. In step s of a collective a rank sends to the rank s places ahead, and receives from the rank s places behind. The
   first transfer that is open, in the order of collectives and steps, can always go on. So there is no deadlock,
   however little the connections hold.

Ranks find each other through the store of the lane. A rank accepts only those that know its token. If any rank cannot
connect to any other, all of them use gloo's connections.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor

from gradwire._torch import Store
from gradwire.engine.gloo import Gloo
from gradwire.kernels.memory import empty

log = logging.getLogger(__name__)

SMALL_BYTES, SHORT_SUM = 1 << 18, "small_all_reduce"
"""Between two ranks, sums of up to this size are gathered and added by each rank: the same bytes, less waiting. The
cost of such a sum is measured under a name of its own."""
CONNECT_S, HELLO_S = 4.0, 1.0
"""How long a rank waits for the others to connect, and for a caller to say which rank it is. All ranks are there, as
gloo has connected; one that dies in between is noticed after this time."""
TOKEN_BYTES, HELLO_BYTES = 16, 20
GET_ADDRESS = 0x8915
"""Linux's `SIOCGIFADDR`: the address of an interface."""

Pieces = list[tuple[int, memoryview]]
"""Bytes by rank, in the order of the steps."""


class LostConnection(RuntimeError):
    """A link is lost, closed, or has moved nothing within the time limit."""


def way(collective: str, size: int, sent_bytes: float) -> str:
    """The name under which the cost of a collective is measured: sums take another way depending on their size."""
    return SHORT_SUM if collective == "all_reduce" and size == 2 and sent_bytes <= SMALL_BYTES else collective


class Linked(Gloo):
    """A gloo group whose gathers and all-to-alls on the CPU use links."""

    def __init__(self, gloo: Gloo, links: Links) -> None:
        super().__init__(gloo._group, gloo.devices)
        self.links = links

    def all_reduce(self, tensor: Tensor) -> Any:
        """Sum, in place."""
        if self._size != 2 or not _is_plain(tensor) or tensor.numel() * tensor.element_size() > SMALL_BYTES:
            return super().all_reduce(tensor)
        other = empty(tensor.shape, tensor.dtype, tensor.device)
        swap = self.links.swap(_bytes(other).view(1, -1), _bytes(tensor).view(1, -1))
        first, second = (tensor, other) if self._rank == 0 else (other, tensor)  # of two NaN, the first one remains
        return Then(swap, lambda: torch.add(first, second, out=tensor))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Any:
        """(n,) on each rank -> (size * n,)."""
        if not _is_plain(tensor):
            return super().all_gather(out, tensor)
        rows, mine = _bytes(out).view(self._size, -1), _bytes(tensor)
        if rows[self._rank].data_ptr() != mine.data_ptr():
            rows[self._rank].copy_(mine)
        return self.links.swap(rows, mine.view(1, -1))

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Any:
        """(size, n) -> (size, n)."""
        if not _is_plain(tensor):
            return super().all_to_all(out, tensor)
        out[self._rank].copy_(tensor[self._rank])
        return self.links.swap(_bytes(out).view(self._size, -1), _bytes(tensor).view(self._size, -1))

    def shutdown(self) -> None:
        """Close the connections: collectives under way fail at once, here and on the other ranks."""
        self.links.close()
        super().shutdown()

    def close(self) -> None:
        """No collective is under way, and none will come."""
        self.links.close()


class Links:
    """A connection to every other rank. Collectives are issued by one thread at a time, the same ones on all ranks."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout: timedelta) -> None:
        """`timeout` ends a wait in which nothing moves."""
        self._sockets, self._timeout = sockets, timeout
        size = len(sockets) + 1
        self._ahead = [(rank + step) % size for step in range(1, size)]
        self._behind = [(rank - step) % size for step in range(1, size)]
        self._last = threading.Lock()
        """Released when everything has been received that was issued so far."""
        self._rest: queue.SimpleQueue[tuple[Pieces, threading.Lock] | None] = queue.SimpleQueue()
        self._queued = self._sent = 0
        """How many collectives were given to the thread that sends the rest, and how many it has sent."""
        self._sender: threading.Thread | None = None
        self._error: LostConnection | None = None
        self._process = os.getpid()
        limit = struct.pack("ll", int(timeout.total_seconds()), timeout.microseconds)
        for connection in sockets.values():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, limit)
        weakref.finalize(self, _close, list(sockets.values())).atexit = False  # jobs may still end then: see leaving.py

    def swap(self, rows: Tensor, mine: Tensor) -> Transfer:
        """Receive the row of each other rank, and send it the row that is for it: bytes, (size, n).

        A tensor with a single row has that row for, or from, whichever rank it is.
        """
        into = _pieces(rows, self._behind)
        transfer = Transfer(self, into, self._last)
        self._last = transfer.received
        self._send(_pieces(mine, self._ahead), transfer.sent)
        return transfer

    def receive(self, pieces: Pieces) -> None:
        """Fill the pieces; raises LostConnection."""
        try:
            for other, view in pieces:
                self.check()
                try:
                    self._receive(other, view)
                except OSError as error:
                    self._fail(f"could not receive from rank {other}", error)
        except BaseException:  # what comes next on the connections is not what the next collective waits for
            self.close()
            raise

    def _receive(self, other: int, view: memoryview) -> None:
        while view:
            count = self._sockets[other].recv_into(view, 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionResetError("it has closed the connection")
            view = view[count:]

    def _send(self, pieces: Pieces, sent: threading.Lock) -> None:
        if self._queued == self._sent:
            pieces = self._send_now(pieces)
        if not pieces:
            sent.release()
            return
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_rest, name="gradwire-send", daemon=True)
            self._sender.start()
        self._queued += 1
        self._rest.put((pieces, sent))

    def _send_now(self, pieces: Pieces) -> Pieces:
        """Send what the connections take without waiting. What is left."""
        left = []
        for other, view in pieces:
            count = 0
            with suppress(OSError):  # a broken connection fails again when the rest is sent
                count = self._sockets[other].send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            if count < len(view):
                left.append((other, view[count:]))
        return left

    def _send_rest(self) -> None:
        while (item := self._rest.get()) is not None:
            pieces, sent = item
            try:
                self._send_all(pieces)
            except BaseException:
                self.close()
            finally:
                del item, pieces
                self._sent += 1
                sent.release()

    def _send_all(self, pieces: Pieces) -> None:
        for other, view in pieces:
            try:
                self._sockets[other].sendall(view, socket.MSG_NOSIGNAL)
            except OSError as error:
                self._fail(f"could not send to rank {other}", error)

    def _fail(self, what: str, error: OSError) -> None:
        """Raise the first error that there was."""
        if isinstance(error, BlockingIOError):
            why: object = f"timed out after {self._timeout.total_seconds():g} s"
        else:
            why = error.strerror or error
        self._error = self._error or LostConnection(f"{what}: {why}")
        self.check()

    def check(self) -> None:
        """Raise LostConnection if a connection is lost or closed. Then nothing is sent from any tensor any more."""
        if self._error is not None:
            self.close()
            raise LostConnection(*self._error.args)

    def close(self) -> None:
        """End all waiting, here and on the other ranks. In a fork of the process it does nothing."""
        if self._process != os.getpid():
            return
        self._error = self._error or LostConnection("this rank has closed its connections")
        for connection in self._sockets.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._rest.put(None)


class Transfer:
    """A collective over links: work to wait for. It is received when those before it are, so some thread must wait for
    each of them."""

    def __init__(self, links: Links, pieces: Pieces, before: threading.Lock) -> None:
        self._links, self._pieces, self._before = links, pieces, before
        self.received, self.sent = threading.Lock(), threading.Lock()
        """Released when that is done."""
        self.received.acquire()
        self.sent.acquire()
        self._taken = False

    def wait(self, within: timedelta | None = None) -> None:
        """Wait until everything is done, up to the time limit of the links; raises LostConnection."""
        with self._before:
            pass
        if not self._taken:
            self._taken = True
            try:
                self._links.receive(self._pieces)
            finally:
                self.received.release()
        self._links.check()  # on broken links, nobody may be there to send the rest
        with self.sent:
            pass
        self._links.check()

    def is_completed(self) -> bool:
        """It always has when `wait` returns or raises."""
        return True


class Then:
    """Work that continues after a transfer has ended."""

    def __init__(self, work: Transfer, after: Any) -> None:
        self._work, self._after = work, after

    def wait(self, within: timedelta | None = None) -> None:
        """Wait until everything is done; raises LostConnection."""
        self._work.wait()
        self._after()

    def is_completed(self) -> bool:
        """It always has when `wait` returns or raises."""
        return True


# -- how ranks find each other -----------------------------------------------------------------------------------------


class Door:
    """Where the other ranks can connect to this one, announced in the store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._server: socket.socket | None = None
        address = None
        if os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP":  # else gloo encrypts
            with suppress(OSError):
                family, host = own_address()
                self._server = socket.create_server((host, 0), family=family, backlog=size)
                address = [host, self._server.getsockname()[1], self._token.hex()]
        store.set(f"link/{rank}", json.dumps(address))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    def linked(self, gloo: Gloo, timeout: timedelta) -> Gloo:
        """The group with links, made by all ranks together after it is connected; without if there can be none."""
        sockets: dict[int, socket.socket] = {}
        others = {r: json.loads(self._store.get(f"link/{r}")) for r in range(self._size) if r != self._rank}
        problem = "" if self._server and all(others.values()) else "a rank has no address to connect to"
        try:
            if not problem:
                self._connect(others, sockets, min(CONNECT_S, timeout.total_seconds()))
        except OSError as error:
            problem = f"rank {self._rank} could not connect: {error}"
        if self._any_failed(gloo, bool(problem), sockets):
            log.info("lanes use gloo's connections, as %s", problem or "another rank could not connect")
            return gloo
        return Linked(gloo, Links(self._rank, sockets, timeout))

    def _any_failed(self, gloo: Gloo, failed: bool, sockets: dict[int, socket.socket]) -> bool:
        """Whether that is so on any rank. Then the sockets are closed."""
        found = torch.tensor([int(failed)])
        try:
            gloo.all_reduce(found).wait()
        except RuntimeError:
            _close(sockets.values())
            raise
        if found:
            _close(sockets.values())
        return bool(found)

    def _connect(self, others: dict[int, Any], sockets: dict[int, socket.socket], limit_s: float) -> None:
        """To the ranks below, and then from those above. `sockets` is filled with the connections."""
        until_s = time.monotonic() + limit_s
        for other in range(self._rank):
            host, port, token = others[other]
            sockets[other] = socket.create_connection((host, port), timeout=max(until_s - time.monotonic(), 0.01))
            sockets[other].sendall(bytes.fromhex(token) + self._rank.to_bytes(4, "big"))
        while len(sockets) < self._size - 1:
            assert self._server is not None
            self._server.settimeout(max(until_s - time.monotonic(), 0.01))
            caller = self._server.accept()[0]
            other = self._greeted(caller, until_s)
            if other in others and other not in sockets:
                sockets[other] = caller
            else:
                caller.close()

    def _greeted(self, caller: socket.socket, until_s: float) -> int:
        """The rank that calls, or -1 for a stranger."""
        hello, until_s = b"", min(until_s, time.monotonic() + HELLO_S)
        with suppress(OSError):
            while len(hello) < HELLO_BYTES:
                caller.settimeout(max(until_s - time.monotonic(), 0.01))
                part = caller.recv(HELLO_BYTES - len(hello))
                if not part:
                    break
                hello += part
        known = hmac.compare_digest(hello[:TOKEN_BYTES], self._token) and len(hello) == HELLO_BYTES
        return int.from_bytes(hello[TOKEN_BYTES:], "big") if known else -1


def own_address() -> tuple[socket.AddressFamily, str]:
    """The address that gloo would choose: that of the first interface in GLOO_SOCKET_IFNAME, else the one that the
    host's name stands for, else loopback."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return socket.AF_INET, _interface_address(names[0])
    with suppress(OSError, UnicodeError):  # not every name of a host is one of the network
        for family, kind, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind((address[0], 0))
                return family, str(address[0])
    return socket.AF_INET, "127.0.0.1"


def _interface_address(name: str) -> str:
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()))
    return socket.inet_ntoa(answer[20:24])


def _close(sockets: Iterable[socket.socket]) -> None:
    for connection in sockets:
        connection.close()


def _pieces(rows: Tensor, ranks: Sequence[int]) -> Pieces:
    views = [memoryview(row.numpy()) for row in rows]
    return [(rank, views[rank if len(views) > 1 else 0]) for rank in ranks]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_sparse and tensor.is_contiguous() and tensor.numel() > 0


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
