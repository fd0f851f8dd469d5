"""The laws of exchanges, on ranks that are threads."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.engine.hook import Hook
from gradwire.exchanges import Exchange
from gradwire.exchanges.bucket import Bucket, make_bucket
from gradwire.testing.contracts.codecs import gaussian
from gradwire.testing.threads import Rank, thread_ranks


def check_mean(exchange: Exchange, size: int) -> None:
    """Bit-identical on all ranks and within the stated bound, for whole and ragged sizes and several chunks."""
    bound = exchange.bound(size)
    for numel in (0, 1, 5, 1000, 40_003):
        inputs = [gaussian(numel, seed=rank, scale=10.0**rank) for rank in range(size)]
        means = thread_ranks(size, lambda rank, xs=inputs: _mean(rank, exchange, xs[rank.rank]))  # type: ignore[misc]
        if bound is None:
            assert all(torch.equal(mean, own) for mean, own in zip(means, inputs, strict=True))
            continue
        assert all(torch.equal(mean, means[0]) for mean in means), numel
        doubles = torch.stack(inputs).double()
        rms = float(doubles.square().sum(1).mean().sqrt()) or 1.0
        error = float((means[0].double() - doubles.mean(0)).norm()) / rms
        assert error <= bound, (numel, error, bound)


def check_non_finite_reaches_all(exchange: Exchange, size: int) -> None:
    """An inf or NaN on one rank is in every rank's average."""
    for bad in (math.inf, math.nan):
        inputs = [gaussian(5000, seed=rank) for rank in range(size)]
        inputs[-1][1234] = bad
        means = thread_ranks(size, lambda rank, xs=inputs: _mean(rank, exchange, xs[rank.rank]))  # type: ignore[misc]
        assert not any(torch.isfinite(mean[1234]) for mean in means[-1 if exchange.bound(size) is None else 0 :])


def check_many_in_flight(exchange: Exchange, size: int) -> None:
    """Dozens of buckets at once, step after step: each gets its own mean, whatever the threads do."""

    def run(rank: Rank) -> list[Tensor]:
        hook, means = rank.hook(exchange, chunk_bytes=1024), []
        for step in range(2):
            buckets = [_bucket(_sized(i, step + rank.rank), i) for i in range(24)]
            for future in [hook.mean(bucket) for bucket in buckets]:
                future.wait()
            means += [bucket.flat for bucket in buckets]
        return means

    everyone = thread_ranks(size, run)
    for position, means in enumerate(zip(*everyone, strict=True)):
        step, index = divmod(position, 24)
        exact = torch.stack([_sized(index, step + rank) for rank in range(size)]).double().mean(0)
        if (bound := exchange.bound(size)) is not None:
            assert all(torch.equal(mean, means[0]) for mean in means)
            assert float((means[0].double() - exact).norm()) <= 2 * bound * math.sqrt(exact.numel())


def check_conservation(exchange: Exchange, size: int) -> None:
    """With feedback: what was averaged plus what is kept is what came in, step after step.

    For gradients of 16 bits, up to the rounding of the averages themselves.
    """
    if not exchange.takes_residual:
        return
    steps, numel = 4, 3001
    for dtype, slack in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)):
        outcomes = thread_ranks(size, lambda rank, dtype=dtype: _with_feedback(rank, exchange, steps, numel, dtype))  # type: ignore[misc]
        emitted = torch.stack(outcomes[0][0]).double().sum(0)
        kept = torch.stack([residual for _, residual in outcomes]).double().mean(0)
        inputs = [[_input(rank, step, numel).to(dtype) for rank in range(size)] for step in range(steps)]
        came_in = sum(torch.stack(ranks).double().mean(0) for ranks in inputs)
        assert float((emitted + kept - came_in).abs().max()) <= steps * size * slack, dtype


def check_residual_survives_inf(exchange: Exchange, size: int) -> None:
    """A step with an inf leaves the residual as it was, whatever the gradients' type."""
    if not exchange.takes_residual:
        return

    def run(rank: Rank, dtype: torch.dtype) -> bool:
        hook = rank.hook(exchange)
        hook.mean(_bucket(_input(rank.rank, 0, 2000).to(dtype))).wait()
        before = _residual(hook)
        bad = _input(rank.rank, 1, 2000).to(dtype)
        bad[7] = math.inf if rank.rank == 0 else bad[7]
        hook.mean(_bucket(bad)).wait()
        owes = bool(before.any()) or dtype == torch.bfloat16  # which fp16 carries as it is
        return owes and torch.equal(before, _residual(hook))

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert all(thread_ranks(size, lambda rank, dtype=dtype: run(rank, dtype))), dtype  # type: ignore[misc]


def check_traffic(exchange: Exchange, size: int) -> None:
    """What a rank sends does not grow with the ranks: never more than a float32 all-reduce."""

    def run(rank: Rank) -> float:
        hook = rank.hook(exchange)
        bucket = _bucket(gaussian(60_000))
        hook.begin(bucket)
        hook.mean(bucket).wait()
        return hook.stats().sent_bytes

    limit = 60_000 * 4 * 2 * (size - 1) / size
    assert all(sent <= limit for sent in thread_ranks(size, run))


def _mean(rank: Rank, exchange: Exchange, values: Tensor) -> Tensor:
    hook, bucket = rank.hook(exchange, chunk_bytes=16_384), _bucket(values)
    hook.mean(bucket).wait()
    return bucket.flat


def _bucket(values: Tensor, index: int = 0) -> Bucket:
    """A square matrix, and one row with what is left: vectors may be exempt from coding."""
    side = math.isqrt(values.numel())
    square, row = values.split([side * side, values.numel() - side * side])
    return make_bucket([square.view(side, side), row.view(1, -1)], [f"{index}.square", f"{index}.row"], index)


def _residual(hook: Hook) -> Tensor:
    """What is kept for a bucket, in its order."""
    kept = hook.state_dict()["residuals"]
    return torch.cat([kept["0.square"], kept["0.row"]])


def _sized(index: int, seed: int) -> Tensor:
    return gaussian(100 + 137 * index, seed=seed)


def _input(rank: int, step: int, numel: int) -> Tensor:
    return gaussian(numel, seed=100 * rank + step)


def _with_feedback(
    rank: Rank, exchange: Exchange, steps: int, numel: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    hook, means = rank.hook(exchange, chunk_bytes=4096), []
    for step in range(steps):
        bucket = _bucket(_input(rank.rank, step, numel).to(dtype))
        means.append(hook.mean(bucket).wait())
    return means, _residual(hook)


EXCHANGE_CHECKS: tuple[Callable[[Exchange, int], None], ...] = (
    check_mean,
    check_non_finite_reaches_all,
    check_many_in_flight,
    check_conservation,
    check_residual_survives_inf,
    check_traffic,
)
