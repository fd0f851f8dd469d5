"""Step 8, the cutting part: a bucket becomes jobs for the engine, one a chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.bucket import Bucket
from gradwire.comm import Comm
from gradwire.exchanges import Exact, Exchange
from gradwire.feedback import Residuals, fed_back
from gradwire.runner import Job

Scale = Callable[[], float] | None
"""Gives a last factor for the mean, when the exchange is done."""


def chunks_of(bucket: Bucket, exchange: Exchange, size: int, chunk_bytes: int | None = None) -> list[Bucket]:
    """Equal parts near the wanted size, cut at whole blocks of every shard, or between tensors."""
    flat, unit = bucket.flat, size * exchange.align
    wanted = chunk_bytes or exchange.chunk_bytes(size)
    parts = max(1, round(flat.numel() * flat.element_size() / wanted))
    if unit == 0:
        return bucket.chunks(-(-flat.numel() // parts), whole=True)
    return bucket.chunks(-(-flat.numel() // (parts * unit)) * unit)


def jobs_of(
    bucket: Bucket, chunks: Sequence[Bucket], exchange: Exchange, residuals: Residuals, scale: Scale = None
) -> list[Job]:
    """What averages a bucket, with what feedback keeps of it."""
    if bucket.flat.is_sparse:
        return [job_of(Exact(), bucket, None, scale)]
    sizes = [chunk.flat.numel() for chunk in chunks]
    if exchange.takes_residual:
        parts = residuals.of(bucket).split(sizes)
        return [job_of(exchange, *pair, scale) for pair in zip(chunks, parts, strict=True)]
    if (due := residuals.due(bucket)) is not None:  # from before a switch
        residual, paid = due
        parts = residual.split(sizes)
        return [_paying_job(exchange, *pair, paid, scale) for pair in zip(chunks, parts, strict=True)]
    return [job_of(exchange, chunk, None, scale) for chunk in chunks]


def job_of(exchange: Exchange, bucket: Bucket, residual: Tensor | None = None, scale: Scale = None) -> Job:
    """What averages one chunk."""

    def run(comm: Comm) -> None:
        exchange.mean_(bucket, comm, residual)
        if scale is not None:
            bucket.flat.mul_(scale())

    return run


def _paying_job(exchange: Exchange, bucket: Bucket, owed: Tensor, paid: list[Tensor], scale: Scale) -> Job:
    """For an exchange that keeps no residual. What could not be paid, as the mean is not finite, stays owed."""

    def run(comm: Comm) -> None:
        with fed_back(bucket.flat, owed) as work:
            exchange.mean_(dataclasses.replace(bucket, flat=work), comm)
            owed.zero_()
        paid.append(torch.isfinite(bucket.flat).all())
        if scale is not None:
            bucket.flat.mul_(scale())

    return run
