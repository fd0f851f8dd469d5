"""Verification of a sharded model: the reduce-scatter and the gather, on messages such as the model's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradwire.codecs.int8 import Int8
from gradwire.engine.runner import Job, Runner
from gradwire.engine.shard_residuals import ShardResiduals
from gradwire.engine.verify import MOST_VALUES, STEPS, Verifiable, Verification, check_fired, chosen, raise_together
from gradwire.errors import VerifyError
from gradwire.exchanges.base import Exchange
from gradwire.exchanges.bucket import Bucket, Segment
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.sharded import Shard, gather_reference, scatter_reference


class VerifiableShards(Verifiable, Protocol):
    """What `verify_sharded` uses of a ShardedHook."""

    runner: Runner
    gather_runner: Runner
    gathers: Exchange
    shards: dict[str, Shard]
    rows: dict[int, tuple[Segment, ...]]
    gathered: dict[int, tuple[Segment, ...]]

    def columns(self, bucket: Bucket, itemsize: int, wanted: Exchange) -> list[tuple[slice, Bucket]]:
        """The chunks of a message."""

    def scatter_jobs(self, bucket: Bucket, rows: Tensor, alpha: float, store: ShardResiduals) -> list[Job]:
        """What reduce-scatters a message."""

    def gather_jobs(self, bucket: Bucket, rows: Tensor) -> list[Job]:
        """What gathers a message."""


def verify_sharded(hook: VerifiableShards, name: str) -> Verification:
    """Check that the hook has run, and its results, on all ranks together."""
    steps, worst = check_fired(hook), 0.0
    if hook.size == 1:
        return Verification(name, steps, True, 0.0, 0.0)
    if isinstance(hook.gathers, Coded):
        for index, row in sorted(hook.gathered.items()):
            _try_gather(hook, index, _chosen(hook, row))
    if not isinstance(hook.exchange, Coded):  # FSDP2's own collective, or none
        return Verification(name, steps, True, None, None)
    for index, row in sorted(hook.rows.items()):
        worst = max(worst, _try_scatter(hook, index, _chosen(hook, row)))
    bound = 1.01 * hook.exchange.codec.bound + hook.size * 2.0**-23
    if worst > bound:
        raise VerifyError(f"{name}: error {worst:.3g} of the mean is above the promised {bound:.3g}")
    return Verification(name, steps, True, worst, bound, worst)


def _chosen(hook: VerifiableShards, row: tuple[Segment, ...]) -> tuple[Segment, ...]:
    return chosen(row, MOST_VALUES // hook.size**2)


def _try_scatter(hook: VerifiableShards, index: int, row: tuple[Segment, ...]) -> float:
    """Reduce-scatter noise for three steps with a state of their own, the last with an inf; the first one's error."""
    numel, error = sum(segment.numel for segment in row), 0.0
    store = ShardResiduals(hook.size, hook.shards.values(), hook.device)
    residuals = [torch.zeros(hook.size, numel) for _ in range(hook.size)] if hook.exchange.takes_residual else None
    for step in range(STEPS):
        rows = torch.stack([_sample(row, hook.rank, step, owner) for owner in range(hook.size)]).to(hook.device)
        if step == STEPS - 1 and hook.rank == hook.size - 1:
            rows[0, numel // 2 : numel // 2 + 1] = math.inf
        everyone = list(hook.gather(rows.view(-1)).view(hook.size, hook.size, numel))
        bucket = Bucket(index, torch.empty(numel, device=hook.device), row, is_last=False, step=hook.steps + step)
        text = ""
        hook.runner.submit(hook.scatter_jobs(bucket, rows, 1.0 / hook.size, store), bucket.flat, counted=False).wait()
        results = hook.gather(bucket.flat)
        for where, chunk in hook.columns(bucket, rows.element_size(), hook.exchange):
            text = text or _difference(hook, everyone, where, chunk, results, store, residuals)
        raise_together(hook, text, results)
        error = error or _error(results, everyone)
    return error


def _difference(
    hook: VerifiableShards,
    everyone: Sequence[Tensor],
    where: slice,
    chunk: Bucket,
    results: Tensor,
    store: ShardResiduals,
    residuals: list[Tensor] | None,
) -> str:
    """Say what is wrong with one chunk; empty if nothing is. `residuals`, of all ranks, are brought up to date."""
    coded = hook.exchange
    assert isinstance(coded, Coded)
    before = None if residuals is None else [residual[:, where] for residual in residuals]
    wanted = scatter_reference(coded, [rows[:, where].cpu() for rows in everyone], chunk, 1.0 / hook.size, before)
    flat = dataclasses.replace(wanted, mean=wanted.mean.reshape(-1))
    text = flat.difference(results[:, where].reshape(-1).cpu())
    if wanted.residuals is None or residuals is None:
        return text
    after = [_packed(kept, chunk.segments) if coded.packs_residual else kept for kept in wanted.residuals]
    for residual, kept in zip(residuals, after, strict=True):
        residual[:, where] = kept
    own = store.take(chunk.segments).cpu()
    return text or ("" if torch.equal(own, after[hook.rank]) else f"the residual of rank {hook.rank} is wrong")


def _packed(residual: Tensor, segments: Sequence[Segment]) -> Tensor:
    """A residual as it comes back from 8 bits."""
    codec, pieces = Int8(), residual.split([segment.numel for segment in segments], 1)
    rows = [[codec.decode(codec.encode(row.contiguous()), row.numel()) for row in piece] for piece in pieces]
    return torch.cat([torch.stack(piece) for piece in rows], 1)


def _error(results: Tensor, everyone: Sequence[Tensor]) -> float:
    inputs = torch.stack(list(everyone)).double().flatten(1)
    rms = float(inputs.square().sum(1).mean().sqrt()) or 1.0
    return float((results.double().flatten() - inputs.mean(0)).norm()) / rms


def _try_gather(hook: VerifiableShards, index: int, row: tuple[Segment, ...]) -> None:
    """Gather noise; every rank must get what the reference makes of the exact rows."""
    assert isinstance(hook.gathers, Coded)
    own = _sample(row, hook.rank, 0, hook.rank).to(hook.device)
    exact, rows = hook.gather(own), torch.zeros(hook.size, own.numel(), device=hook.device)
    rows[hook.rank] = own
    bucket = Bucket(index, rows[0], row, is_last=False)
    hook.gather_runner.submit(hook.gather_jobs(bucket, rows), rows, counted=False).wait()
    text = ""
    for where, chunk in hook.columns(bucket, rows.element_size(), hook.gathers):
        wanted = gather_reference(hook.gathers, exact[:, where].cpu(), chunk)
        if not torch.equal(wanted, rows[:, where].cpu()):
            text = f"gathered parameters of {row[0].name!r} are not those of the reference"
    raise_together(hook, text, rows)


def _sample(row: Sequence[Segment], rank: int, step: int, owner: int) -> Tensor:
    """Values for one row, with a scale of its own for each tensor and rank."""
    generator = torch.Generator().manual_seed(100_000 * rank + 100 * step + owner)
    parts = [torch.randn(s.numel, generator=generator) * 10.0 ** (i % 4 - 2) for i, s in enumerate(row)]
    return torch.cat(parts) * (1.0 + rank % 4 / 4.0)
