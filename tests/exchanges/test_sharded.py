"""The coded reduce-scatter and gather: the contracts of exchanges, references and mutants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import SpecError
from gradwire.exchanges import Coded, Exchange
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket, Segment
from gradwire.exchanges.reference import Reference
from gradwire.exchanges.sharded import (
    Shard,
    check_gathers,
    check_scatters,
    gather_,
    gather_reference,
    scatter_,
    scatter_reference,
)
from gradwire.testing import check_exchange
from gradwire.testing.threads import thread_ranks

from .test_contracts import check_rejects_mutants

CODED = ("bf16", "fp16:feedback=true", "int8", "int8:rounding=stochastic", "int4:exempt=none", "int2:feedback=true")


@dataclass(frozen=True)
class Scattered(Exchange):
    """The reduce-scatter as an average: afterwards all ranks gather the rows, so that contracts can look at them."""

    inner: Coded
    lanes = 3

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        numel, rows = bucket.flat.numel(), _rows(bucket.flat, comm.size)
        kept = None if residual is None else _rows(residual, comm.size)
        out = torch.empty(rows.shape[1], dtype=rows.dtype)
        scatter_(self.inner, rows, out, _row(bucket, rows), comm, 1.0 / comm.size, kept)
        bucket.flat.copy_(comm.all_gather(out).view(-1)[:numel])
        if residual is not None and kept is not None:
            residual.copy_(kept.view(-1)[:numel])

    def reference(self, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None = None) -> Reference:
        size, numel = len(buckets), buckets[0].flat.numel()
        everyone = [_rows(bucket.flat, size) for bucket in buckets]
        kept = None if residuals is None else [_rows(residual, size) for residual in residuals]
        got = scatter_reference(self.inner, everyone, _row(buckets[0], everyone[0]), 1.0 / size, kept)
        left = None if got.residuals is None else tuple(rows.reshape(-1)[:numel] for rows in got.residuals)
        return Reference(got.mean.reshape(-1)[:numel], got.tolerance, left)

    def bound(self, size: int) -> float:
        return 1.01 * self.inner.codec.bound + size * 2.0**-23

    takes_residual = property(lambda self: self.inner.takes_residual)
    align = property(lambda self: self.inner.align)

    def __str__(self) -> str:
        return f"reduce-scatter of {self.inner}"


def _rows(flat: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(size, -1).clone()


def _row(bucket: Bucket, rows: Tensor) -> Bucket:
    """Two tensors for each row, the second one short."""
    numel = rows.shape[1]
    short = min(7, numel // 2)
    segments = [Segment("a", torch.empty(2, 1024), 0, numel - short), Segment("b", torch.empty(3), 0, short)]
    return Bucket(0, rows[0], tuple(s for s in segments if s.numel), is_last=False, step=bucket.step)


def scattered(spec: str) -> Scattered:
    exchange = gradwire.exchange(spec)
    assert isinstance(exchange, Coded)
    return Scattered(exchange)


def cases(quick: Sequence[str]) -> list[Any]:
    return [pytest.param(spec, marks=() if spec in quick else pytest.mark.thorough) for spec in CODED]


@pytest.mark.parametrize("spec", cases(("int8", "int2:feedback=true")))
def test_the_reduce_scatter_keeps_every_contract(spec: str) -> None:
    check_exchange(scattered(spec), sizes=(3,))


@pytest.mark.parametrize("spec", CODED)
def test_wrong_reduce_scatters_are_rejected(spec: str) -> None:
    check_rejects_mutants(scattered(spec), 2)


def gathered(size: int, spec: str, spoil: Any = None) -> tuple[list[Tensor], Tensor]:
    """What each rank has after a gather, and what the reference says."""
    coded, numel = gradwire.exchange(spec), 3000
    assert isinstance(coded, Coded)
    exact = torch.stack([torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)])
    row = _row(Bucket(0, exact[0], (), is_last=False), exact)

    def run(rank: Any) -> Tensor:
        rows = torch.full((size, numel), math.nan)
        rows[rank.rank] = exact[rank.rank]
        rank.hook("exact").run(lambda comm: gather_(coded, rows, row, comm))
        if spoil is not None:
            spoil(rows, rank.rank)
        return rows

    return thread_ranks(size, run), gather_reference(coded, exact, row)


@pytest.mark.parametrize("spec", ["bf16", "fp16", "fp8", "int8", "int4"])
def test_every_rank_gathers_the_bits_of_the_reference(spec: str) -> None:
    for size in (2, 3):
        everyone, wanted = gathered(size, spec)
        assert all(torch.equal(rows, wanted) for rows in everyone)


def keep_own(rows: Tensor, rank: int) -> None:
    rows[rank] += 1e-3  # the exact values instead of the decoded ones


@pytest.mark.parametrize("spoil", [keep_own, lambda rows, rank: rows.copy_(rows.flip(0)), lambda r, _: r.mul_(1.01)])
def test_wrong_gathers_are_rejected(spoil: Any) -> None:
    everyone, wanted = gathered(2, "int8", spoil)
    assert not all(torch.equal(rows, wanted) for rows in everyone)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("shape", "size"), [((5, 4), 2), ((3, 4), 4), ((8,), 2), ((2, 6, 2), 2)])
def test_rows_and_whole_parameters_are_turned_into_each_other(shape: tuple[int, ...], size: int, dim: int) -> None:
    if dim >= len(shape) or (dim and shape[dim] % size):
        dim = 0
    padded = list(shape)
    padded[dim] = -(-shape[dim] // size)
    shard = Shard("p", torch.empty(shape), torch.Size(shape), torch.Size(padded), dim)
    values = torch.arange(math.prod(shape), dtype=torch.float32)
    rows = shard.to_rows(values, size)
    assert torch.equal(shard.from_rows(rows), values)
    chunks = values.view(shape).chunk(size, dim)
    for row, chunk in zip(rows, chunks, strict=False):
        assert torch.equal(row[: chunk.numel()], chunk.reshape(-1))


@pytest.mark.parametrize(
    "spec", ["powersgd", "two_level:node=1", "bf16:accumulate=wire", "int8:shots=one", "int4:allocate=true"]
)
def test_what_cannot_reduce_scatter_is_refused(spec: str) -> None:
    with pytest.raises(SpecError, match="sharded model"):
        check_scatters(gradwire.exchange(spec))


@pytest.mark.parametrize(
    "spec", ["powersgd", "noop", "topk", "int8:rounding=stochastic", "int8:feedback=true", "fp16:accumulate=wire"]
)
def test_what_cannot_gather_is_refused(spec: str) -> None:
    with pytest.raises(SpecError, match="gather"):
        check_gathers(gradwire.exchange(spec))


def test_packing_residuals_needs_feedback() -> None:
    with pytest.raises(SpecError, match="feedback=true"):
        gradwire.exchange("int8:residual=int8")
    assert str(gradwire.exchange("int8:feedback=true,residual=int8")) == "int8:feedback=true,residual=int8"
