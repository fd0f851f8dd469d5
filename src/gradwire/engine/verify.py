"""Verification: does the hook do what it should on this model, on these ranks, now?"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradwire.engine.drift import different
from gradwire.engine.fingerprint import fingerprint
from gradwire.errors import VerifyError
from gradwire.exchanges.base import Exchange
from gradwire.exchanges.bucket import Bucket, Memory, Segment, cut
from gradwire.exchanges.simulated import expected
from gradwire.exchanges.whiten import SecondMoments

MOST_VALUES = 1 << 22
"""The largest number of values of a bucket, of all ranks together, that are compared."""
STEPS = 3
"""The first step, one that uses what the first has left behind, and one with an inf."""


class Verifiable(Protocol):
    """What `verify` uses of a Hook."""

    exchange: Exchange
    rank: int
    size: int
    device: torch.device
    layouts: dict[int, tuple[Segment, ...]]
    moments: SecondMoments | None

    @property
    def steps(self) -> int:
        """Steps averaged, those before a checkpoint included."""

    @property
    def fired(self) -> int:
        """Steps averaged since registration, or since a checkpoint was loaded."""

    def gather(self, values: Tensor) -> Tensor:
        """(n,) on each rank -> (size, n)."""

    def chunks(self, bucket: Bucket) -> list[Bucket]:
        """The jobs that average a bucket."""

    def try_out(self, bucket: Bucket, residual: Tensor | None = None) -> None:
        """Average a bucket in place, without touching the state of the hook."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `Hook.verify()`. A broken promise is raised, not returned."""

    hook: str
    steps: int
    """Steps the hook has averaged, the same on every rank."""
    identical: bool
    """All ranks hold the same parameters, bit for bit. Only `noop` may return False."""
    error: float | None
    """Largest error of a bucket's mean, relative to the rms norm of the ranks' gradients; None if none was measured."""
    bound: float | None
    """What the exchange promises for `error`."""
    reference: float | None = None
    """The error of the exchange's reference on the same gradients; None if it has none."""

    def __str__(self) -> str:
        same = "replicas bit-identical" if self.identical else "replicas differ, as noop leaves them"
        error = "no averaging"
        if self.error is not None:
            reference = "" if self.reference is None else f"reference {self.reference:.2g}, "
            error = f"error {self.error:.2g} ({reference}bound {self.bound:.2g})"
        return f"{self.hook}: {self.steps} steps on every rank, {same}, {error}"


def verify(hook: Verifiable, params: Sequence[tuple[str, Tensor]]) -> Verification:
    """Check that the hook has run, that `params` are identical, and its results, on all ranks together."""
    name, averages = str(hook.exchange), hook.exchange.averages
    steps = check_fired(hook)
    differing = different(hook.gather, params)
    if differing and averages:
        raise VerifyError(
            f"{name}: ranks hold different values in {len(differing)} parameters, first {differing[0]!r}. Something "
            "besides the hook changes them (a step on some ranks only, say), or they differed before registration"
        )
    if not averages:
        return Verification(name, steps, not differing, None, None)
    if hook.size == 1:
        return Verification(name, steps, True, 0.0, 0.0)
    layouts = [(i, segments) for i, segments in hook.layouts.items() if sum(segment.numel for segment in segments)]
    errors = [_try_out(hook, index, segments) for index, segments in layouts]
    if not errors:  # an engine that serves several models does not know their buckets
        return Verification(name, steps, True, None, None)
    worst = max(errors, key=lambda error: error.error / error.bound)
    return Verification(name, steps, True, worst.error, worst.bound, worst.reference)


def check_fired(hook: Verifiable) -> int:
    """Raise VerifyError unless the hook has run equally often on all ranks. Returns how often."""
    rows = hook.gather(torch.tensor([hook.fired, hook.steps], device=hook.device)).tolist()
    silent, counts = [rank for rank, (fired, _) in enumerate(rows) if fired == 0], [steps for _, steps in rows]
    if silent and counts[silent[0]]:
        raise VerifyError(
            f"{hook.exchange}: the hook has not run on rank {', '.join(map(str, silent))} since its checkpoint was "
            "loaded. Call verify() after the next backward pass"
        )
    if silent:
        raise VerifyError(
            f"{hook.exchange}: the hook has not run on rank {', '.join(map(str, silent))}. Call verify() after a "
            "backward pass through the DDP module itself (not model.module) and outside no_sync(), or through the root "
            "of a model with fully_shard, with gradient sync on"
        )
    if len(set(counts)) > 1:
        raise VerifyError(f"{hook.exchange}: ranks have averaged different numbers of steps: {counts}")
    return int(counts[0])


@dataclass(frozen=True, slots=True)
class _Error:
    """The error of the first step on one bucket."""

    error: float
    reference: float | None
    bound: float


def _try_out(hook: Verifiable, index: int, segments: tuple[Segment, ...]) -> _Error:
    """Average gradients such as the model's through the hook, with a state of their own, and compare."""
    segments = chosen(segments, MOST_VALUES // hook.size)
    numel, memory, wanted_memory = sum(segment.numel for segment in segments), Memory(), Memory()
    residual = torch.zeros(numel, device=hook.device) if hook.exchange.takes_residual else None
    residuals = None if residual is None else [torch.zeros_like(residual)] * hook.size
    first: _Error | None = None
    for step in range(STEPS):
        flat = torch.cat([_sample(segment, hook.rank, step) for segment in segments])
        if step == STEPS - 1 and hook.rank == hook.size - 1:
            flat[numel // 2 : numel // 2 + 1] = math.inf
        inputs = hook.gather(flat.view(torch.uint8)).view(flat.dtype)
        begun = max(hook.steps, hook.exchange.warmup) + step
        moment_of = None if hook.moments is None else hook.moments.for_bucket(begun)
        bucket = Bucket(index, flat, segments, is_last=False, step=begun, memory=memory, moment_of=moment_of)
        owns = [dataclasses.replace(bucket, flat=row, memory=wanted_memory) for row in inputs]
        wanted = expected(hook.exchange, [hook.chunks(own) for own in owns], residuals)
        hook.try_out(bucket, residual)
        exact = inputs.double().mean(0)
        if wanted is not None:
            text = wanted.difference(flat) or wanted.residual_difference(hook.rank, residual)
            residuals = None if wanted.residuals is None else list(wanted.residuals)
        else:
            lost = torch.isfinite(exact) | ~torch.isfinite(flat)
            text = "" if lost.all() else "inf and NaN do not reach the result"
        raise_together(hook, text, flat)
        first = first or _errors(hook, flat, exact, inputs, None if wanted is None else wanted.mean)
    assert first is not None
    return first


def raise_together(hook: Verifiable, text: str, result: Tensor) -> None:
    """Raise on all ranks if any rank has a wrong result, or if their results are not the same bits."""
    rows = hook.gather(torch.stack([fingerprint(result), torch.tensor(len(text), device=hook.device)]))
    wrong = rows[:, 1].nonzero().flatten().tolist()
    if wrong:
        which = ", ".join(map(str, wrong))
        raise VerifyError(f"{hook.exchange}: the result on rank {which} is not that of its reference. {text}".rstrip())
    if (rows[:, 0] != rows[0, 0]).any():
        raise VerifyError(f"{hook.exchange}: the results of the ranks are not the same, bit for bit")


def _errors(hook: Verifiable, result: Tensor, exact: Tensor, inputs: Tensor, wanted: Tensor | None) -> _Error:
    rms = float(inputs.double().square().sum(1).mean().sqrt()) or 1.0
    promised = hook.exchange.bound(hook.size)
    bound = math.inf if promised is None else promised + hook.size * torch.finfo(result.dtype).eps
    error, reference = (None if x is None else float((x.double() - exact).norm()) / rms for x in (result, wanted))
    assert error is not None
    if not error <= bound:
        raise VerifyError(f"{hook.exchange}: error {error:.3g} of the mean is above the promised {bound:.3g}")
    return _Error(error, reference, bound)


def chosen(segments: tuple[Segment, ...], most: int) -> tuple[Segment, ...]:
    """Whole tensors of a bucket up to `most` values; the beginning of the first one if none is that small."""
    chosen, room = [], most
    for segment in segments:
        if segment.numel <= room:
            chosen.append(segment)
            room -= segment.numel
    return tuple(chosen) or cut(segments, 0, most)


def _sample(segment: Segment, rank: int, step: int) -> Tensor:
    """A gradient such as this parameter has: its current one, plus as much noise of this rank's own.

    The scale differs between ranks, so that a result with another rank's scale is noticed.
    """
    param = segment.param
    real = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
    generator = torch.Generator(param.device).manual_seed(1000 * rank + step)
    noise = torch.randn(segment.numel, generator=generator, device=param.device) * (1.0 + rank % 4 / 4.0)
    if param.grad is None or param.grad.is_sparse:
        return noise.to(real.dtype)
    grad = torch.view_as_real(param.grad) if param.grad.is_complex() else param.grad
    grad = torch.nan_to_num(grad.detach().reshape(-1).float(), 0.0, 0.0, 0.0)[segment.start :][: segment.numel]
    return (grad + noise * (grad.square().mean().sqrt() or 1.0)).to(real.dtype)
