"""Verification: does the hook keep its promises on this model, on these ranks, now?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.errors import VerifyError
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket, Segment

if TYPE_CHECKING:
    from gradwire.engine.hook import Hook


@dataclass(frozen=True, slots=True)
class Verification:
    """What `Hook.verify()` found. A broken promise is raised, not returned."""

    hook: str
    steps: int
    """Steps the hook has averaged, the same on every rank."""
    identical: bool
    """All ranks hold the same parameters, bit for bit. Only `noop` may return False."""
    error: float | None
    """Largest error of a bucket's mean, relative to the rms norm of the ranks' gradients; None for `noop`."""
    bound: float | None
    """What the exchange promises for `error`."""

    def __str__(self) -> str:
        same = "replicas bit-identical" if self.identical else "replicas differ, as noop leaves them"
        error = "no averaging" if self.error is None else f"error {self.error:.2g} (bound {self.bound:.2g})"
        return f"{self.hook}: {self.steps} steps on every rank, {same}, {error}"


def verify(hook: Hook, params: Sequence[tuple[str, Tensor]]) -> Verification:
    """Check firing, bit-identity and error, on all ranks together."""
    name, averages = str(hook.exchange), hook.exchange.averages
    steps = _check_fired(hook)
    different = _different(hook, params)
    if different and averages:
        raise VerifyError(
            f"{name}: ranks hold different values in {len(different)} parameters, first {different[0]!r}. Something "
            "besides the hook changes them (a step on some ranks only, say), or they differed before registration"
        )
    errors = (
        [_error(hook, index, segments) for index, segments in hook.layouts.items()]
        if averages and hook.size > 1
        else []
    )
    alone = (0.0, 0.0) if averages else (None, None)
    worst, bound = max(errors, default=alone, key=lambda pair: pair[0] / pair[1])
    if worst is not None and bound is not None and not worst <= bound:
        raise VerifyError(f"{name}: error {worst:.3g} of the mean is above the promised {bound:.3g}")
    return Verification(name, steps, not different, worst, bound)


def _check_fired(hook: Hook) -> int:
    counts = hook.gather(torch.tensor([hook.steps], device=hook.device))[:, 0].tolist()
    if min(counts) == 0:
        silent = [rank for rank, count in enumerate(counts) if count == 0]
        raise VerifyError(
            f"{hook.exchange}: the hook has not run on rank {', '.join(map(str, silent))}. Call verify() after a "
            "backward pass through the DDP module itself (not model.module) and outside no_sync()"
        )
    if len(set(counts)) > 1:
        raise VerifyError(f"{hook.exchange}: ranks have averaged different numbers of steps: {counts}")
    return int(counts[0])


def _different(hook: Hook, params: Sequence[tuple[str, Tensor]]) -> list[str]:
    if not params:
        return []
    prints = torch.stack([fingerprint(param) for _, param in params])
    everyone = hook.gather(prints)
    differs = (everyone != everyone[0]).any(0).tolist()
    return [name for (name, _), differ in zip(params, differs, strict=True) if differ]


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit sum over the tensor's bits that depends on their order."""
    values = tensor.detach().contiguous().view(-1)
    real = torch.view_as_real(values).view(-1) if values.is_complex() else values
    bits = real.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in bits.split(1 << 20):
        place = torch.arange(1, part.numel() + 1, device=tensor.device) * 0x9E3779B97F4A7C1 + 1
        total = total * 31 + ((part.to(torch.int64) + 1) * place).sum()
    return total


def _error(hook: Hook, index: int, segments: tuple[Segment, ...]) -> tuple[float, float]:
    """The error of the mean on one bucket's worth of gradients, and what is promised for it."""
    flat = torch.cat([_sample(segment, hook.rank) for segment in segments])
    exact = flat.double()
    norms = exact.square().sum().reshape(1)
    bucket = Bucket(index, flat, segments, is_last=False)
    hook.run(lambda comm: _exact_mean_(comm, exact, norms))
    hook.try_out(bucket)
    rms = math.sqrt(float(norms)) or 1.0
    bound = hook.exchange.bound(hook.size) or 0.0
    slack = hook.size * torch.finfo(flat.dtype).eps
    return float((flat.double() - exact).norm()) / rms, bound + slack


def _exact_mean_(comm: Comm, values: Tensor, norms: Tensor) -> None:
    packed = comm.all_reduce_(torch.cat([values, norms])) / comm.size
    values.copy_(packed[:-1])
    norms.copy_(packed[-1:])


def _sample(segment: Segment, rank: int) -> Tensor:
    """A gradient such as this parameter has: its current one, plus as much noise of this rank's own."""
    param = segment.param
    real = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
    generator = torch.Generator(param.device).manual_seed(rank)
    noise = torch.randn(segment.numel, generator=generator, device=param.device)
    if param.grad is None or param.grad.is_sparse:
        return noise.to(real.dtype)
    grad = torch.view_as_real(param.grad) if param.grad.is_complex() else param.grad
    grad = torch.nan_to_num(grad.detach().reshape(-1).float(), 0.0, 0.0, 0.0)
    return (grad + noise * (grad.square().mean().sqrt() or 1.0)).to(real.dtype)
