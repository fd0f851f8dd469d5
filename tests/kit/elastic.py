"""For tests of training that goes on when ranks fail: ranks as processes that nobody waits for, and their reports."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from gradwire._torch import TCPStore
from gradwire.optim import DiLoCo, LocalSGD, Shrink, Synchronous
from gradwire.testing.processes import PRELOAD

from .local import Net, train, values

KINDS = {
    "local": partial(LocalSGD, sync_every=4),
    "diloco": partial(DiLoCo, sync_every=4),
    "synchronous": Synchronous,
}
LIMIT_S = 200.0
TIMEOUT_S = 30.0


class Crew:
    """Ranks that can be started at any time, and the store that they use."""

    def __init__(self, **settings: Any) -> None:
        """The settings of the training: `kind`, `ranks`, `end_size`, and what LocalSGD and Shrink take."""
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload([PRELOAD])
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.settings = settings
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.hosts: list[Any] = []
        """Other processes to end."""

    def start(self, number: int, **more: Any) -> int:
        """Start a rank with the data of this number; its place in `processes`."""
        mine, theirs = self.context.Pipe()
        args = (number, self.store.port, {**self.settings, **more}, theirs)
        process = self.context.Process(target=_main, args=args, daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(mine)
        return len(self.processes) - 1

    def report(self, place: int, kind: str) -> Any:
        """The next report of this kind of a rank. An error that it did not expect fails the test."""
        until = time.monotonic() + LIMIT_S
        while self.pipes[place].poll(max(until - time.monotonic(), 0)):
            got, value = self.pipes[place].recv()
            if got == kind:
                return value
            assert got != "error", f"rank {place}: {value}"
        raise AssertionError(f"rank {place} has not reported {kind!r} in time")

    def signal(self, place: int, number: int) -> None:
        os.kill(self.processes[place].pid, number)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in (*self.processes, *self.hosts):
            process.kill()
            process.join()


def _main(number: int, port: int, settings: dict[str, Any], pipe: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        pipe.send(("end", _train(number, port, settings, pipe)))
    except Exception:
        pipe.send(("error", traceback.format_exc()))
    os._exit(0)


def _end_with_parent() -> None:
    while os.getppid() != 1:
        time.sleep(1)
    os._exit(1)


def _train(number: int, port: int, settings: dict[str, Any], pipe: Any) -> dict[str, Any]:
    """Train until `end_size` ranks have trained together for two rounds in a later epoch than `end_epoch`."""
    given = dict(settings)
    kind, ranks = KINDS[given.pop("kind", "local")], given.pop("ranks", 3)
    end_size, end_epoch = given.pop("end_size"), given.pop("end_epoch", 1)
    fault, at = given.pop("fault", None), given.pop("at", -1)
    timeout_s = given.pop("timeout_s", TIMEOUT_S)
    shrink = Shrink(given.pop("store", f"127.0.0.1:{port}"), ranks=ranks, timeout_s=timeout_s)
    model = Net(seed=given.pop("seed", number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=given.pop("momentum", 0.0))
    log: list[tuple[int, int, int]] = []
    end = None
    with kind(model, optimizer, on_failure=shrink, **given) as rounds:
        synchronous, joins = isinstance(rounds, Synchronous), 0
        more = {"average": rounds.average} if synchronous else {}
        while end is None or rounds.steps < end:
            now = (rounds.hook.size, rounds.members.epoch)[::-1]  # the hook waits until the group is formed
            if not log or now != log[-1][:2]:
                # A group is formed before gradients are averaged; members see it only afterwards.
                first = rounds.steps - (synchronous and joins == rounds.members.joins)
                joins = rounds.members.joins
                log.append((*now, first))
                pipe.send(("epoch", log[-1]))
                end = first + 8 if now[1] == end_size and now[0] > end_epoch else None
            if rounds.steps == at and fault is not None:
                _strike(fault, pipe)
                fault = None
            train(model, optimizer, number, [rounds.steps], **more)
        residuals = rounds.hook.state_dict()["residuals"]
        momentum = [optimizer.state[param].get("momentum_buffer") for param in model.parameters()]
    got = {"values": values(model), "log": log, "steps": rounds.steps, "residuals": residuals, "momentum": momentum}
    return {key: _plain(value) for key, value in got.items()}


def _plain(value: Any) -> Any:
    """As numpy: a tensor would travel through a file that ends with its process."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _strike(fault: str, pipe: Any) -> None:
    pipe.send(("fault", fault))
    if fault == "raise":
        raise ValueError("the mistake of this test")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])
