"""Ranks as processes, for DDP itself. A child that fails brings its traceback back; one that hangs is ended."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankFailed(AssertionError):
    """A rank raised, died or hung; the text holds the tracebacks."""


def spawn_ranks(size: int, run: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run `run(rank, size, *args)` in `size` processes under a gloo world; their return values in order.

    `run` must be a function of a module. Results travel by pickle.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_main, args=(rank, size, folder, pipes[rank][1], timeout_s, run, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect([pipe for pipe, _ in pipes], processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _main(
    rank: int,
    size: int,
    folder: str,
    pipe: Connection,
    timeout_s: float,
    run: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    store = f"file://{Path(folder, 'store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    try:
        pipe.send(("ok", run(rank, size, *args)))
    except BaseException:
        pipe.send(("failed", f"rank {rank}:\n{traceback.format_exc()}"))
    # No destroy_process_group: a rank that ended early must not pull the others down before they have reported.
    pipe.close()


def _collect(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        while not pipe.poll(0.01):
            if time.monotonic() > deadline:
                failures.append(f"rank {rank}: no result in time")
                break
            if not process.is_alive() and not pipe.poll(0.01):
                failures.append(f"rank {rank}: died with exit code {process.exitcode}")
                break
        else:
            state, value = pipe.recv()
            if state == "ok":
                results[rank] = value
            else:
                failures.append(value)
    if failures:
        raise RankFailed("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]
