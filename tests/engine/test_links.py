"""Links give what gloo gives, in any order of threads, and end when a rank does."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from gradwire.engine import links as module
from gradwire.engine.gloo import Gloo, TorchGroup
from gradwire.engine.links import SMALL_BYTES, Door, Linked, LostConnection, own_address
from gradwire.engine.runner import LaneRunner
from gradwire.testing import thread_ranks
from gradwire.testing.threads import Rank

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64)
LONG = 24 << 20
"""Bytes that no connection takes at once."""
ROOM = 1 << 17
"""Bytes that a connection over loopback needs, or else it moves one packet at a time."""


def lane_of(rank: Rank) -> tuple[LaneRunner, Any]:
    runner = rank.runner()
    runner.open(1)
    return runner, runner.lanes._lanes[0].group


def gathered(group: Any, mine: torch.Tensor) -> torch.Tensor:
    out = torch.empty(group.size() * mine.numel(), dtype=mine.dtype)
    group.all_gather(out, mine).wait()
    return out


def dealt(group: Any, mine: torch.Tensor) -> torch.Tensor:
    rows = torch.stack([mine + place for place in range(group.size())])
    out = torch.empty_like(rows)
    group.all_to_all(out, rows).wait()
    return out


def summed(group: Any, mine: torch.Tensor) -> torch.Tensor:
    total = mine.clone()
    if mine.dtype == torch.bfloat16 and mine.numel() > 1024:  # the backend sums these slowly
        total = total[:1024].clone()
    group.all_reduce(total).wait()
    return total


@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives_equal_the_backends(size: int) -> None:
    """Bit for bit: two values have one sum, and more are added by the backend."""

    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        assert isinstance(ours, Linked)
        made = torch.Generator().manual_seed(rank.rank)
        for numel in (1, 7, 1024, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1):
            for dtype in DTYPES:
                mine = torch.randint(0, 100, (numel,), generator=made).to(dtype) / (3 if dtype.is_floating_point else 1)
                mine = mine.to(dtype)
                for issue in (gathered, dealt, summed):
                    theirs = issue(TorchGroup(ours._group), mine)
                    assert torch.equal(issue(ours, mine), theirs), (issue.__name__, numel, dtype)
        runner.close()
        return True

    assert all(thread_ranks(size, run))


@pytest.mark.parametrize("size", [2, 3])
def test_empty_and_sparse_tensors_use_the_backend(size: int) -> None:
    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        assert gathered(ours, torch.empty(0)).numel() == 0
        assert summed(ours, torch.empty(0)).numel() == 0
        sparse = torch.sparse_coo_tensor([[rank.rank]], [1.0], (size,)).coalesce()
        ours.all_reduce(sparse).wait()
        runner.close()
        return bool(sparse.to_dense().tolist() == [1.0] * size)

    assert all(thread_ranks(size, run))


@pytest.mark.parametrize("size", [2, 4])
def test_many_messages_under_way_keep_their_order(size: int) -> None:
    """Of all lengths, so that some are sent at once and some by the lane's thread; waited for from the last on."""
    lengths = [LONG // size, 1, 1000, LONG // size, 70_000, 3, 1 << 20, 5]

    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        sent = [torch.full((n,), 20 * index + rank.rank, dtype=torch.uint8) for index, n in enumerate(lengths)]
        outs = [torch.empty(size * mine.numel(), dtype=torch.uint8) for mine in sent]
        works = [ours.all_gather(out, mine) for out, mine in zip(outs, sent, strict=True)]
        threads = [threading.Thread(target=work.wait) for work in reversed(works)]
        for thread in threads:
            thread.start()
            time.sleep(0.002)
        for thread in threads:
            thread.join()
        runner.close()
        rows = [out.view(size, -1) for out in outs]
        wanted = [[20 * index + other for other in range(size)] for index in range(len(lengths))]
        return [row.float().mean(1).tolist() for row in rows] == wanted

    assert all(thread_ranks(size, run))


def test_no_deadlock_when_nobody_has_room() -> None:
    """Rows that are much longer than what connections hold, for every rank."""

    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        for connection in ours.links._sockets.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        for _ in range(5):
            mine = torch.full((20 * ROOM,), rank.rank, dtype=torch.uint8)
            assert dealt(ours, mine)[:, ::1000].float().mean(1).tolist() == [i + rank.rank for i in range(4)]
        runner.close()
        return True

    assert all(thread_ranks(4, run, timeout_s=60))


@pytest.mark.parametrize("numel", [1024, LONG])
def test_rank_that_leaves_ends_the_wait_of_the_others(numel: int) -> None:
    def run(rank: Rank) -> str:
        runner, ours = lane_of(rank)
        if rank.rank == 1:
            del ours
            runner.lanes.break_(RuntimeError("gone"))
            return ""
        with pytest.raises(LostConnection) as caught:
            gathered(ours, torch.zeros(numel, dtype=torch.uint8))
        return str(caught.value)

    assert "rank 1: " in thread_ranks(2, run)[0]


@pytest.mark.parametrize(("size", "numel"), [(2, 1024), (2, LONG), (3, 1024)])
def test_rank_that_gives_up_ends_its_own_wait(size: int, numel: int) -> None:
    """For a rank that has not come to the collective, and does not come before this one has left it."""
    left = threading.Event()

    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        if rank.rank > 0:
            left.wait(30)
            with suppress(LostConnection):  # what it needs may have arrived
                gathered(ours, torch.zeros(numel, dtype=torch.uint8))
            with pytest.raises(LostConnection):
                gathered(ours, torch.zeros(numel, dtype=torch.uint8))
            return True
        work = ours.all_gather(torch.empty(size * numel, dtype=torch.uint8), torch.zeros(numel, dtype=torch.uint8))
        del ours
        runner.lanes.break_(RuntimeError("gone"))
        for _ in range(2):  # the error stays
            with pytest.raises(LostConnection, match="this rank has closed its connections"):
                work.wait()
        left.set()
        return work.is_completed()

    assert all(thread_ranks(size, run))


@pytest.mark.parametrize("numel", [10, LONG])
def test_a_wait_in_which_nothing_moves_ends_at_the_time_limit(numel: int) -> None:
    waited = threading.Event()

    def run(rank: Rank) -> str:
        _runner, ours = lane_of(rank)
        if rank.rank == 1:
            waited.wait(60)
            return ""
        with pytest.raises(LostConnection) as caught:
            gathered(ours, torch.zeros(numel, dtype=torch.uint8))
        waited.set()
        return str(caught.value)

    assert "timed out after 1 s" in thread_ranks(2, run, timeout_s=1)[0]


def test_all_of_gloos_connections_are_closed_when_one_is_gone_already() -> None:
    left = threading.Event()

    def run(rank: Rank) -> None:
        _runner, ours = lane_of(rank)
        if rank.rank == 1:
            ours.shutdown()
        elif rank.rank == 2:
            left.wait(30)
        else:
            with pytest.raises(RuntimeError, match="gloo"):  # when the connection to rank 1 is known to be closed
                ours._group.recv([torch.empty(1)], 1, 1).wait()
            work = ours._group.recv([torch.empty(1)], 2, 1)
            ours.shutdown()
            with pytest.raises(RuntimeError, match="pair closure"):
                work.wait()
            left.set()

    thread_ranks(3, run)


def test_closing_ends_the_thread_and_the_sockets() -> None:
    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        gathered(ours, torch.zeros(LONG, dtype=torch.uint8))
        sockets, sender = list(ours.links._sockets.values()), ours.links._sender
        runner.close()
        sender.join(20)
        del ours
        return not sender.is_alive() and all(one.fileno() == -1 for one in sockets)

    assert all(thread_ranks(2, run))


def test_a_fork_does_not_close_the_connections_of_its_parent() -> None:
    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        if rank.rank == 0:
            ours.links._process += 1  # as the fork sees it
            ours.links.close()
            ours.links._process -= 1
        found = gathered(ours, torch.tensor([rank.rank])).tolist()
        runner.close()
        return bool(found == [0, 1])

    assert all(thread_ranks(2, run))


# -- how ranks find each other -----------------------------------------------------------------------------------------


def test_without_an_address_of_some_rank_all_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(3))

    def address() -> tuple[socket.AddressFamily, str]:
        if next(calls) == 1:
            raise OSError("no such interface")
        return socket.AF_INET, "127.0.0.1"

    monkeypatch.setattr(module, "own_address", address)

    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        found = gathered(ours, torch.tensor([rank.rank])).tolist()
        runner.close()
        return type(ours) is Gloo and found == [0, 1, 2]

    assert all(thread_ranks(3, run))


def test_where_ranks_cannot_reach_each_other_all_use_gloo(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(module.socket, "create_connection", unreachable)
    monkeypatch.setattr(module, "CONNECT_S", 0.2)
    caplog.set_level("INFO", "gradwire")

    def run(rank: Rank) -> bool:
        runner, ours = lane_of(rank)
        mean = rank.mean("int8", [torch.full((5000,), float(rank.rank))]).flat
        runner.close()
        return type(ours) is Gloo and bool(torch.allclose(mean, torch.full((5000,), 0.5)))

    assert all(thread_ranks(2, run))
    assert "lanes use gloo's connections, as rank 1 could not connect: refused" in caplog.text


@pytest.mark.parametrize("hello", [b"", b"x", bytes(20), bytes(16) + (1).to_bytes(4, "big")])
def test_strangers_are_sent_away(hello: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they say, and before or after the ranks connect."""
    monkeypatch.setattr(module, "HELLO_S", 0.2)
    store = HashStore()
    door = Door(store, 0, 2)
    address = door._server.getsockname()  # type: ignore[union-attr]
    with socket.create_connection(address) as stranger:
        stranger.sendall(hello)
        sockets: dict[int, socket.socket] = {}
        with pytest.raises(OSError, match="timed out"):
            door._connect({1: None}, sockets, 0.5)
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    assert not sockets
    door.__exit__()


def test_the_port_is_closed_when_all_have_connected() -> None:
    store = HashStore()
    with Door(store, 0, 1) as door:
        address = door._server.getsockname()  # type: ignore[union-attr]
        socket.create_connection(address).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_the_address_is_that_of_the_interface_or_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert own_address() == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(OSError, match=r"No such device"):
        own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name in ("no-such-host.invalid", "a" * 64):
        monkeypatch.setattr(module.socket, "gethostname", lambda name=name: name)
        assert own_address() == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setattr(module.socket, "gethostname", lambda: "localhost")
    assert own_address()[1] in ("127.0.0.1", "::1")


def test_where_gloo_encrypts_there_are_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    with Door(HashStore(), 0, 2) as door:
        assert door._server is None


def test_a_hello_in_parts_is_understood() -> None:
    with Door(HashStore(), 0, 2) as door:
        address = door._server.getsockname()  # type: ignore[union-attr]
        with socket.create_connection(address) as caller:
            caller.sendall(door._token[:5])
            timer = threading.Timer(0.1, caller.sendall, [door._token[5:] + (1).to_bytes(4, "big")])
            timer.start()
            sockets: dict[int, socket.socket] = {}
            door._connect({1: None}, sockets, 10.0)
            timer.join()
        assert sockets.keys() == {1}
        sockets[1].close()


def test_an_error_that_is_not_of_the_connection_closes_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows on the connection is the rest of a row, and not what the next collective waits for."""

    def run(rank: Rank) -> None:
        _runner, ours = lane_of(rank)
        if rank.rank == 0:
            monkeypatch.setattr(ours.links, "_receive", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                gathered(ours, torch.zeros(10))
        with pytest.raises(LostConnection):
            gathered(ours, torch.zeros(LONG, dtype=torch.uint8))

    thread_ranks(2, run)


def test_two_nan_have_one_sum_on_both_ranks() -> None:
    def run(rank: Rank) -> int:
        runner, ours = lane_of(rank)
        nan = torch.tensor([0x7FC00001 + rank.rank], dtype=torch.int32).view(torch.float32)
        total = int(summed(ours, nan).view(torch.int32))
        runner.close()
        return total

    one, other = thread_ranks(2, run)
    assert one == other


def test_time_limits_are_those_of_the_group() -> None:
    def run(rank: Rank) -> list[float]:
        runner, ours = lane_of(rank)
        limits = [
            timedelta(seconds=int.from_bytes(one.getsockopt(socket.SOL_SOCKET, option, 16)[:8], os.sys.byteorder))
            for one in ours.links._sockets.values()
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
        ]
        runner.close()
        return [limit.total_seconds() for limit in limits]

    assert thread_ranks(2, run, timeout_s=77)[0] == [77.0, 77.0]
