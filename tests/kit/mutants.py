"""Mutants: exchanges that are wrong in one way each. Contracts that accept one of them are not worth much.

A mutant wraps any exchange and delegates everything to it, but spoils what goes in, what comes out or the residual. All
ranks issue the same collectives, so that a mutant gives a wrong result and never a deadlock.

    for mutant in mutants(exchange).values():
        with pytest.raises(AssertionError):
            check_reference(mutant, size=3)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from gradwire.exchanges.base import Comm, Exchange, Levels
from gradwire.exchanges.bucket import Bucket, Memory
from gradwire.exchanges.reference import Reference

Spoil = Callable[["Mutant", Bucket, Comm, Tensor | None], None]
"""Changes the gradients before, or the result after, `mean_` of the wrapped exchange."""


@dataclass(frozen=True)
class Mutant(Exchange):
    """Does what `inner` does, except for what `before` and `after` change."""

    inner: Exchange
    kind: str
    before: Spoil | None = None
    after: Spoil | None = None
    kept: dict[object, Tensor] = field(default_factory=dict, compare=False)
    """What the mutant keeps between calls, by rank, as ranks that are threads share it."""

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Replace the gradients by a wrong result."""
        if residual is not None:
            self.kept[comm.rank, "residual", *_key(bucket)] = residual.clone()
        self.kept[comm.rank, "own", *_key(bucket)] = bucket.flat.clone()
        if self.before is not None:
            self.before(self, bucket, comm, residual)
        self.inner.mean_(bucket, comm, residual)
        if self.after is not None:
            self.after(self, bucket, comm, residual)

    def bound(self, size: int) -> float | None:
        """Like `inner`, as all that follow."""
        return self.inner.bound(size)

    def reference(self, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None = None) -> Reference | None:
        """The result that the mutant should give."""
        return self.inner.reference(buckets, residuals)

    def chunk_bytes(self, size: int) -> int:
        """Delegated."""
        return self.inner.chunk_bytes(size)

    def levels(self, size: int) -> Levels | None:
        """Delegated."""
        return self.inner.levels(size)

    def check(self, params: Sequence[tuple[str, Tensor]]) -> None:
        """Delegated."""
        self.inner.check(params)

    def check_memory(self, memory: Mapping[str, Mapping[str, Tensor]], params: Sequence[tuple[str, Tensor]]) -> None:
        """Delegated."""
        self.inner.check_memory(memory, params)

    def new_memory(self, params: Sequence[tuple[str, Tensor]], device: torch.device) -> Memory:
        """Delegated."""
        return self.inner.new_memory(params, device)

    def warm_up(self, device: torch.device) -> None:
        """Delegated."""
        self.inner.warm_up(device)

    averages = property(lambda self: self.inner.averages)
    packs_residual = property(lambda self: self.inner.packs_residual)
    lanes = property(lambda self: self.inner.lanes + 1)
    takes_residual = property(lambda self: self.inner.takes_residual)
    align = property(lambda self: self.inner.align)
    buckets = property(lambda self: self.inner.buckets)
    warmup = property(lambda self: self.inner.warmup)
    same_kernels = property(lambda self: self.inner.same_kernels)
    reads_optimizer = property(lambda self: self.inner.reads_optimizer)
    traceable = property(lambda self: self.inner.traceable)

    def __str__(self) -> str:
        return f"{self.inner}, mutated ({self.kind})"


@dataclass(frozen=True)
class Noting(Mutant):
    """Does what `inner` does, and notes what mutants that change only the result make of each result.

    One run of the exchange shows them all: the next step does not depend on what they have changed.
    """

    others: Sequence[Mutant] = ()
    noted: dict[tuple[object, ...], Tensor] = field(default_factory=dict, compare=False)
    """Results by mutant, rank, step and chunk."""

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Average as `inner` does."""
        own = bucket.flat.clone()
        self.inner.mean_(bucket, comm, residual)
        for mutant in self.others:
            assert mutant.after is not None
            wrong = replace(bucket, flat=bucket.flat.clone())
            mutant.kept[comm.rank, "own", *_key(bucket)] = own
            mutant.after(mutant, wrong, comm, residual)
            self.noted[mutant.kind, comm.rank, bucket.step, *_key(bucket)] = wrong.flat

    def result(self, kind: str, rank: int, chunks: Sequence[Bucket]) -> Tensor:
        """What a mutant has made of the bucket that was cut into these chunks."""
        return torch.cat([self.noted[kind, rank, chunk.step, *_key(chunk)] for chunk in chunks])


def _key(bucket: Bucket) -> tuple[object, ...]:
    return (*bucket.names, bucket.segments[0].start if bucket.segments else 0)


def _zeros(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    bucket.flat.zero_()


def _own_gradient(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    bucket.flat.copy_(mutant.kept[comm.rank, "own", *_key(bucket)])


def _sum(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    bucket.flat.mul_(comm.size)


def _swap_halves(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    half = bucket.flat.numel() // 2
    bucket.flat[: 2 * half].copy_(bucket.flat[: 2 * half].roll(half))


def _drop_last_block(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    bucket.flat[-max(mutant.align, 32) :].zero_()


def _scale_of_rank_1(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    norms = comm.all_gather(bucket.flat.double().norm().reshape(1))
    factor = float(norms[1] / norms[0])
    if comm.rank == 0 and math.isfinite(factor):
        bucket.flat.mul_(factor)


def _gain(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    bucket.flat.mul_(1.01)


def _leave_out_last(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    if comm.rank == comm.size - 1:
        bucket.flat.zero_()


def _previous(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    key, result = (comm.rank, "result", *_key(bucket)), bucket.flat.clone()
    bucket.flat.copy_(mutant.kept.get(key, result))
    mutant.kept[key] = result


def _round_up(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    bucket.flat.add_(bucket.flat.abs() * 2.0**-7)  # as far as to the next number of 8 significant bits


def _change_a_bit(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    if comm.rank == comm.size - 1:
        bucket.flat[:1].copy_(torch.nextafter(bucket.flat[:1], torch.full_like(bucket.flat[:1], math.inf)))


def _hide_nan(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    bucket.flat.nan_to_num_(0.0, 0.0, 0.0)


def _shift(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    bucket.flat.copy_(bucket.flat.roll(1))


def _keep_old_residual(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    if residual is not None:
        residual.copy_(mutant.kept[comm.rank, "residual", *_key(bucket)])


def _add_residual(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    if residual is not None:
        bucket.flat.add_(residual)


def _lose_residual(mutant: Mutant, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
    if residual is not None:
        residual.zero_()


MUTANTS: Mapping[str, tuple[Spoil | None, Spoil | None]] = MappingProxyType(
    {
        "zeros": (None, _zeros),
        "own gradient": (None, _own_gradient),
        "sum instead of mean": (None, _sum),
        "chunks swapped": (None, _swap_halves),
        "last block dropped": (None, _drop_last_block),
        "another rank's scale": (_scale_of_rank_1, None),
        "1% gain": (None, _gain),
        "one rank left out": (_leave_out_last, None),
        "previous step's result": (None, _previous),
        "rounding biased": (None, _round_up),
        "bits differ between ranks": (None, _change_a_bit),
        "NaN hidden": (None, _hide_nan),
        "values shifted": (None, _shift),
    }
)
"""What is done before and after `mean_`, for every exchange that averages."""
RESIDUAL_MUTANTS: Mapping[str, tuple[Spoil | None, Spoil | None]] = MappingProxyType(
    {
        "stale residual": (None, _keep_old_residual),
        "residual added twice": (_add_residual, None),
        "residual lost": (None, _lose_residual),
    }
)
"""The same for exchanges with feedback."""


def noting(exchange: Exchange) -> Noting:
    """The exchange itself, which notes the results of all of its mutants that change nothing else."""
    others = [mutant for mutant in mutants(exchange).values() if mutant.kind in MUTANTS and mutant.before is None]
    return Noting(exchange, "noting", others=others)


def mutants(exchange: Exchange) -> dict[str, Mutant]:
    """Every mutant of an exchange, by name; none of one that does not average.

    Example:
        >>> mutants(gradwire.exchange("int8"))["zeros"].mean_(bucket, comm)
    """
    kinds = {**MUTANTS, **(RESIDUAL_MUTANTS if exchange.takes_residual else {})} if exchange.averages else {}
    return {kind: Mutant(exchange, kind, *spoil) for kind, spoil in kinds.items()}
