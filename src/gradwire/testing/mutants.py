"""Mutants: exchanges that are wrong in one way each. Contracts that accept one of them are not worth much.

A mutant wraps any exchange and delegates everything to it, but spoils what goes in, what comes out or the residual. All
ranks issue the same collectives, so that a mutant gives a wrong result and never a deadlock.

    for make in MUTANTS.values():
        with pytest.raises(AssertionError):
            check_reference(make(exchange), size=3)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from gradwire.exchanges.base import Comm, Exchange, Levels
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.reference import Reference


@dataclass(frozen=True)
class Mutant(Exchange):
    """Does what `inner` does. Subclasses override `before` or `after`."""

    inner: Exchange
    memory: dict[object, Tensor] = field(default_factory=dict, compare=False)
    """What a mutant keeps between the calls. Ranks that are threads share it."""

    def before(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Spoil the gradients."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Spoil the result."""

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """The mean of `inner`, spoilt."""
        self.before(bucket, comm, residual)
        self.inner.mean_(bucket, comm, residual)
        self.after(bucket, comm, residual)

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

    def warm_up(self, device: torch.device) -> None:
        """Delegated."""
        self.inner.warm_up(device)

    averages = property(lambda self: self.inner.averages)
    lanes = property(lambda self: self.inner.lanes + 1)
    takes_residual = property(lambda self: self.inner.takes_residual)
    align = property(lambda self: self.inner.align)
    buckets = property(lambda self: self.inner.buckets)
    warmup = property(lambda self: self.inner.warmup)
    same_kernels = property(lambda self: self.inner.same_kernels)
    traceable = property(lambda self: self.inner.traceable)

    def __str__(self) -> str:
        return f"{self.inner}, mutated ({type(self).__name__})"


class Zeros(Mutant):
    """All results are zero."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Forget the result."""
        bucket.flat.zero_()


class OwnGradient(Mutant):
    """Every rank keeps its own gradient."""

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Put the gradient back."""
        own = bucket.flat.clone()
        self.inner.mean_(bucket, comm, residual)
        bucket.flat.copy_(own)


class Sum(Mutant):
    """The sum instead of the mean."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Multiply by the number of ranks."""
        bucket.flat.mul_(comm.size)


class SwappedChunks(Mutant):
    """The two halves of the result have changed places."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Swap them."""
        half = bucket.flat.numel() // 2
        bucket.flat[: 2 * half].copy_(bucket.flat[: 2 * half].roll(half))


class LastBlockDropped(Mutant):
    """The last block is missing."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Zero it."""
        bucket.flat[-max(self.align, 32) :].zero_()


class AnothersScale(Mutant):
    """Rank 0's gradient is decoded with the scale of rank 1's."""

    def before(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Scale it."""
        norms = comm.all_gather(bucket.flat.double().norm().reshape(1))
        factor = float(norms[1] / norms[0])
        if comm.rank == 0 and math.isfinite(factor):
            bucket.flat.mul_(factor)


class StaleResidual(Mutant):
    """The residual is never updated."""

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Give `inner` a copy."""
        self.inner.mean_(bucket, comm, None if residual is None else residual.clone())


class ResidualTwice(Mutant):
    """The residual is added twice."""

    def before(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Add it once more."""
        if residual is not None:
            bucket.flat.add_(residual)


class ResidualLost(Mutant):
    """The residual is zero after every step."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Forget it."""
        if residual is not None:
            residual.zero_()


class Gain(Mutant):
    """The result is 1% too large."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Scale it."""
        bucket.flat.mul_(1.01)


class RankLeftOut(Mutant):
    """The last rank's gradient counts as zero."""

    def before(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Zero it."""
        if comm.rank == comm.size - 1:
            bucket.flat.zero_()


class PreviousResult(Mutant):
    """Every step returns the result of the step before; the first one its own."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Exchange this result for the last."""
        key = comm.rank, bucket.names, bucket.segments[0].start if bucket.segments else 0
        result = bucket.flat.clone()
        bucket.flat.copy_(self.memory.get(key, result))
        self.memory[key] = result


class BiasedRounding(Mutant):
    """Values are rounded up, as to 8 significant bits."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Move every value up by one such step."""
        bucket.flat.add_(bucket.flat.abs() * 2.0**-7)


class DifferentBits(Mutant):
    """The last rank's first value differs in its last bit."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Change that bit."""
        if comm.rank == comm.size - 1:
            bucket.flat[:1].copy_(torch.nextafter(bucket.flat[:1], torch.full_like(bucket.flat[:1], math.inf)))


class HiddenNaN(Mutant):
    """Inf and NaN come out as zero."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Replace them."""
        bucket.flat.nan_to_num_(0.0, 0.0, 0.0)


class Shifted(Mutant):
    """Every value is where its neighbour belongs."""

    def after(self, bucket: Bucket, comm: Comm, residual: Tensor | None) -> None:
        """Shift by one."""
        bucket.flat.copy_(bucket.flat.roll(1))


MUTANTS: Mapping[str, Callable[[Exchange], Mutant]] = MappingProxyType(
    {
        "zeros": Zeros,
        "own_gradient": OwnGradient,
        "sum_instead_of_mean": Sum,
        "chunks_swapped": SwappedChunks,
        "last_block_dropped": LastBlockDropped,
        "another_ranks_scale": AnothersScale,
        "gain_of_1_percent": Gain,
        "one_rank_left_out": RankLeftOut,
        "previous_result": PreviousResult,
        "rounding_biased": BiasedRounding,
        "bits_differ_between_ranks": DifferentBits,
        "nan_hidden": HiddenNaN,
        "values_shifted": Shifted,
    }
)
"""For every exchange that averages."""
RESIDUAL_MUTANTS: Mapping[str, Callable[[Exchange], Mutant]] = MappingProxyType(
    {"stale_residual": StaleResidual, "residual_added_twice": ResidualTwice, "residual_lost": ResidualLost}
)
"""For exchanges with feedback."""


def mutants(exchange: Exchange) -> dict[str, Mutant]:
    """Every mutant of an exchange, by name."""
    makes = {**MUTANTS, **(RESIDUAL_MUTANTS if exchange.takes_residual else {})}
    return {name: make(exchange) for name, make in makes.items()} if exchange.averages else {}
