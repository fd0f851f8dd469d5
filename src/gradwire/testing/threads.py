"""Ranks as threads of this process, over real gloo and the real engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire._torch import HashStore, Store
from gradwire.engine.gloo import THREADS
from gradwire.engine.hook import Hook
from gradwire.engine.lanes import Lanes
from gradwire.engine.runner import LaneRunner
from gradwire.errors import SpecError
from gradwire.exchanges import Exchange, exchange
from gradwire.exchanges.bucket import Bucket, make_bucket

T = TypeVar("T")


@dataclass(slots=True)
class Rank:
    """One of the ranks, as the function under test sees it."""

    rank: int
    size: int
    store: Store
    timeout_s: float
    _made: itertools.count[int] = field(default_factory=itertools.count)
    _hooks: list[Hook] = field(default_factory=list)

    def runner(self, threads: int = THREADS) -> LaneRunner:
        """An engine. All ranks must make theirs in the same order."""
        name = f"test/{next(self._made)}"
        return LaneRunner(Lanes(self.store, self.rank, self.size, timedelta(seconds=self.timeout_s), name), threads)

    def hook(
        self,
        spec: str | Exchange,
        *,
        chunk_bytes: int | None = None,
        threads: int = THREADS,
        runner: LaneRunner | None = None,
    ) -> Hook:
        """A hook without a model, closed at the end of the test. Hooks that are used in turn may share a runner."""
        made = Hook(
            exchange(spec),
            runner or self.runner(threads),
            rank=self.rank,
            size=self.size,
            device=torch.device("cpu"),
            chunk_bytes=chunk_bytes,
        )
        self._hooks.append(made)
        return made

    def mean(self, spec: str | Exchange, grads: Sequence[Tensor], **options: Any) -> Bucket:
        """Average some gradients once and wait."""
        bucket = make_bucket(grads)
        self.hook(spec, **options).mean(bucket).wait()
        return bucket

    def close(self) -> None:
        """Close every hook made here."""
        for hook in self._hooks:
            hook.close()


def thread_ranks(size: int, run: Callable[[Rank], T], timeout_s: float = 120.0) -> list[T]:
    """Run a function on ranks that are threads of this process.

    A rank closes its hooks when all ranks have returned, for another one may still be connecting to it, or at once when
    one fails.

    Args:
        size: The number of ranks.
        run: Called with the `Rank`.
        timeout_s: The time limit of collectives, so that no rank waits for ever.

    Returns:
        The results in the order of the ranks.

    Raises:
        SpecError: If there are no ranks.
        TimeoutError: If a rank does not end. An error of a rank is raised as it is, that of the lowest rank first.

    Examples:
        >>> thread_ranks(2, lambda rank: rank.mean("int8", [torch.ones(8)]).flat)
    """
    if size < 1:
        raise SpecError(f"the number of ranks must be at least 1, got {size}")
    store, results, errors = HashStore(), {}, {}
    returned = threading.Barrier(size)

    def main(rank: Rank) -> None:
        try:
            results[rank.rank] = run(rank)
        except BaseException as error:
            errors[rank.rank] = error
            returned.abort()
        with suppress(threading.BrokenBarrierError):
            returned.wait()
        with suppress(Exception):
            rank.close()

    ranks = [Rank(index, size, store, timeout_s) for index in range(size)]
    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 10)
    if errors:
        raise errors[min(errors)]
    if len(results) < size:
        missing = sorted(set(range(size)) - results.keys())
        raise TimeoutError(f"ranks {missing} did not end within {timeout_s + 10:.0f} s")
    return [results[index] for index in range(size)]
