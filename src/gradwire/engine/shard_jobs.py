"""Jobs of a sharded model: what reduces one chunk of gradients, and what gathers one chunk of parameters.

A job holds the gradients only until it has encoded them. What it sends and receives is its work space, and all the
memory that it takes. The docs (`docs/fsdp2.md`) have the formula.
"""

from __future__ import annotations

import threading
from functools import partial

from torch import Tensor
from torch.futures import Future

from gradwire.engine.runner import Job
from gradwire.engine.shard_residuals import ShardResiduals
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.sharded import add_arrived_, encode_rows, gather_

POLL_S = 0.05
"""How often somebody who waits for an encoding looks whether it has failed."""


class Message:
    """The gradients of a unit, until all its chunks are encoded."""

    def __init__(self, rows: Tensor, chunks: int) -> None:
        self._rows: Tensor | None = rows
        self._left = chunks
        self._lock = threading.Lock()
        self._encoded = threading.Event()

    def columns(self, where: slice) -> Tensor:
        """What one chunk encodes, once."""
        assert self._rows is not None
        return self._rows[:, where]

    def encoded(self) -> None:
        """A chunk is encoded. After the last one the memory is free."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._rows = None
                self._encoded.set()

    def wait(self, future: Future[Tensor]) -> None:
        """Wait until it is encoded, or until the reduction has failed."""
        while not self._encoded.wait(POLL_S) and not future.done():
            pass


def scatter_job(
    coded: Coded, message: Message, where: slice, chunk: Bucket, alpha: float, store: ShardResiduals | None
) -> Job:
    """Reduces one chunk of columns of a message into `chunk.flat`."""

    def run(comm: Comm) -> None:
        residual = None if store is None else store.take(chunk.segments)
        sent = encode_rows(coded, message.columns(where), chunk.flat, chunk, comm, alpha, residual)
        message.encoded()
        finite = add_arrived_(coded, sent, chunk.flat, chunk, comm, alpha)
        if store is not None and residual is not None and finite is not None:
            store.put(chunk.segments, residual, finite)

    return run


def gather_job(coded: Coded, rows: Tensor, chunk: Bucket) -> Job:
    """Gathers one chunk of columns of a message, in place."""
    return partial(gather_, coded, rows, chunk)
