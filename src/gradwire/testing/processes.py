"""Ranks as processes, for DDP itself. A rank that fails brings its traceback back; one that hangs is ended.

1. A server process imports torch, Numba and gradwire once (`gradwire.testing.preload`). Every rank is forked from it,
   which takes milliseconds where a new interpreter takes seconds. The server itself runs nothing and has no threads
   of Python, and torch starts its threads at their first use: a forked rank is like a new process.
2. The ranks of a pool wait for functions. Each call gets a new gloo world, the environment and the folder that a new
   process would have, random states that differ between ranks, and torch with one thread.
3. When all ranks have returned, all are told so and leave their world. After a failure the whole pool is replaced.
4. A rank ends when its pipe is closed, whatever it is doing: none outlives the process that made it.
"""

import gc
import itertools
import os
import pickle
import queue
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire._torch import PrefixStore, Store, TCPStore
from gradwire.errors import SpecError
from gradwire.testing import device

PRELOAD = "gradwire.testing.preload"
"""The module that the fork server imports."""

GRACE_S = 20.0
"""How long the other ranks may go on after one has failed: they usually report the same failure, or its effect."""

LEAVE = b""
"""Sent in place of a call when all ranks have returned: no rank needs the others any longer."""

_leaving = ExitStack()


class RankFailed(AssertionError):
    """A rank raised, died or hung; the text holds the tracebacks."""


def when_all_returned(act: Callable[[], None]) -> None:
    """Call `act` on this rank when all ranks have returned. What another rank may still need is closed like this."""
    _leaving.callback(act)


def spawn_ranks(
    size: int, run: Callable[..., Any], *args: Any, timeout_s: float = 300.0, test_device: bool = False
) -> list[Any]:
    """Run a function in new processes under a gloo world.

    Args:
        size: The number of ranks.
        run: Called as `run(rank, size, *args)`. It must be a function of a module.
        args: Travel by pickle, as results do.
        timeout_s: How long the ranks may take.
        test_device: Load the device of `gradwire.testing.device`; the world then moves its tensors too.

    Returns:
        The results in the order of the ranks.

    Raises:
        SpecError: If there are no ranks.
        RankFailed: If a rank raised, died, or did not return within `timeout_s`.

    Examples:
        >>> spawn_ranks(2, train, "int8")  # calls train(rank, size, "int8")
    """
    pool = RankPool(size, test_device=test_device)
    try:
        return pool.run(run, *args, timeout_s=timeout_s)
    finally:
        pool.close()


@dataclass(frozen=True)
class _Call:
    """A function to run, and what a new process would find around it."""

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float
    test_device: bool
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)


class RankPool:
    """`size` processes that run functions one after another, each in a gloo world of its own.

    Processes start at the first call. What a function changes for good in its process (imported modules, caches,
    global settings), the next function finds; the environment, the folder, random states, warning filters and the
    number of torch's threads are set anew for each. After a failure the next call has new processes.

    Args:
        size: The number of ranks.
        test_device: Whether they have the device of `gradwire.testing.device`.

    Examples:
        >>> pool = RankPool(2)
        >>> pool.run(function)
        >>> pool.close()
    """

    def __init__(self, size: int, *, test_device: bool = False) -> None:
        """With `test_device` the ranks have the device of `gradwire.testing.device`, as in `spawn_ranks`."""
        if size < 1:
            raise SpecError(f"the number of ranks must be at least 1, got {size}")
        self.size = size
        self._test_device = test_device
        self._calls = itertools.count()
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._store: Store | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Run `function(rank, size, *args)` on every rank; the return values in order. See `spawn_ranks`."""
        call = pickle.dumps(_Call(next(self._calls), function, args, timeout_s, self._test_device))
        deadline = time.monotonic() + timeout_s
        try:
            self._start()
            _send(self._pipes, call)
            results = self._collect(deadline)
        except BaseException:
            self.close()
            raise
        _send(self._pipes, LEAVE)
        return results

    def close(self) -> None:
        """End the processes, whatever they are doing. The pool starts again if it is used again."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        if self._processes:
            return
        context = get_context("forkserver")
        context.set_forkserver_preload([PRELOAD])  # without effect on a server that runs already
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_main, args=(rank, self.size, store.port, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._processes.append(process)
            self._pipes.append(mine)
        self._store = store

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "no result in time")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                returned, value = self._receive(rank)
                (results if returned else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise RankFailed("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [results[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        """Whether the function returned, and its result or what happened instead."""
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return False, f"died with exit code {self._processes[rank].exitcode}"


def _send(pipes: list[Any], message: bytes) -> None:
    for pipe in pipes:
        try:
            pipe.send_bytes(message)
        except BrokenPipeError:  # it died since its last call: found out by the next receive
            continue


def _main(rank: int, size: int, port: int, pipe: Any) -> None:
    """The life of a rank: calls, and after each one the word that all ranks have returned."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that made the pool is interrupted, and ends the ranks
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, calls), daemon=True).start()
    gc.freeze()  # collecting garbage between calls does not have to look at what was loaded before
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    while True:
        message = calls.get()
        if message == LEAVE:
            _leave()
        else:
            _reset(rank)
            pipe.send_bytes(_outcome(message, rank, size, store))


def _listen(pipe: Any, calls: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            calls.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)


def _outcome(message: bytes, rank: int, size: int, store: Store) -> bytes:
    try:
        call: _Call = pickle.loads(message)
        os.chdir(call.folder)
        os.environ.clear()
        os.environ.update(call.environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        own, limit = PrefixStore(f"call {call.number}", store), timedelta(seconds=call.timeout_s)
        if call.test_device:
            device.load()
        dist.init_process_group(
            device.GROUP if call.test_device else "gloo", store=own, rank=rank, world_size=size, timeout=limit
        )
        with warnings.catch_warnings():
            return pickle.dumps((True, call.function(rank, size, *call.args)))
    except BaseException:
        return pickle.dumps((False, f"\n{traceback.format_exc()}"))


def _reset(rank: int) -> None:
    """Random states are different on each rank, as in new processes, but the same in every run."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)


def _leave() -> None:
    _leaving.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # modules and caches that a call has brought in: a compiler's take longer to look at than most calls
