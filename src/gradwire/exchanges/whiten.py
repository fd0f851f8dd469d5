"""Whitening, the option `whiten` of codecs: gradients travel in units of the optimizer's own divisor.

Adam divides what it has averaged by the root of a second moment v, value by value. A block of a codec has one scale, so
that its large values decide the error of all of them, and Adam then magnifies that error where v is small. Here each
rank sends

    g / d,   d = sqrt(v + floor),   floor = 0.001 to 0.002 x the mean of v over the parameter,

and all ranks multiply the mean by d: the error is the same everywhere in units of *updates*. v is that of the last
optimizer step, which all ranks hold with the same bits, so nothing more travels. The factors of Adam's bias correction
and of a loss scale are the same for a whole tensor, and the scales of blocks absorb them. The floor keeps values whose
gradients were almost always zero, such as rare rows of an embedding, from dominating their blocks.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire import kernels
from gradwire._torch.fsdp import local_values
from gradwire.errors import ExchangeError, RegisterError
from gradwire.exchanges.bucket import Bucket, SecondMoment, Segment, flattened
from gradwire.exchanges.feedback import working_copy

log = logging.getLogger("gradwire")

FLOOR = 0.001
"""The floor, relative to the mean of v; rounded up to a power of two (see `floor_of`)."""
SAMPLE = 1 << 16
LEAST_FLOOR = 2.0**-80
"""So that gradients of any size, divided by its root and squared, stay finite."""
WARMUP = 15
"""The number of first steps that average exactly: v of a few steps is a poor guide."""
MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum", "variance")
"""Names of second moments in the states of optimizers: Adam and its relatives, RMSprop, Adagrad, Adafactor."""
WITHOUT = ("SGD", "ASGD", "Rprop", "LBFGS", "Muon", "Adamax", "Lion")
"""Optimizers that have none."""


@contextmanager
def whitened(
    bucket: Bucket, values: Tensor, residual: Tensor | None, exempt: Callable[[Segment], bool]
) -> Iterator[Tensor]:
    """Yield the values of a bucket divided by d, in place; on exit they, and the residual, are multiplied by d.

    So a residual is kept in units of gradients. Segments that are exempt, or that have no second moment yet, are left
    as they are. 16-bit values are too coarse: a copy in float32 is yielded instead of them.
    """
    work, sizes = working_copy(values), [segment.numel for segment in bucket.segments]
    moments = [None if exempt(segment) else _moment(bucket, segment) for segment in bucket.segments]
    _each(moments, work.split(sizes), "divide_")
    yield work
    _each(moments, work.split(sizes), "multiply_")
    if residual is not None:
        _each(moments, residual.split(sizes), "multiply_")
    if work is not values:
        values.copy_(work)


def _each(moments: Sequence[SecondMoment | None], parts: Sequence[Tensor], what: str) -> None:
    for part, moment in zip(parts, moments, strict=True):
        if moment is not None:
            getattr(kernels.pick("whiten", part), what)(part, *moment)


def divisors(bucket: Bucket, exempt: Callable[[Segment], bool]) -> Tensor:
    """d for every value of a bucket, with ones where `whitened` leaves values alone. For references."""
    wide = torch.float64 if bucket.flat.dtype == torch.float64 else torch.float32
    found = torch.ones(bucket.flat.shape, dtype=wide, device=bucket.flat.device)
    for part, segment in zip(found.split([s.numel for s in bucket.segments]), bucket.segments, strict=True):
        moment = None if exempt(segment) else _moment(bucket, segment)
        if moment is not None:
            part.copy_((moment.values + moment.floor).double().sqrt())
    return found


def _moment(bucket: Bucket, segment: Segment) -> SecondMoment | None:
    return None if bucket.moment_of is None else bucket.moment_of(segment)


def warm_up(values: Tensor) -> None:
    """Use the kernels once."""
    kernel, floor = kernels.pick("whiten", values), torch.ones((), device=values.device)
    kernel.multiply_(kernel.divide_(values, values.clone(), floor), values.clone(), floor)


def floor_of(moment: Tensor) -> Tensor:
    """A power of two, so that ranks which add up in another order, with more threads say, get the same bits.

    The mean of a large tensor is that of some 100,000 values all over it: summing up all of them would take as long as
    encoding them.
    """
    sample = moment[:: moment.numel() // SAMPLE | 1]
    mean = sample.sum(dtype=torch.float64) / sample.numel() * FLOOR
    power = torch.ldexp(torch.ones_like(mean), torch.frexp(mean).exponent)  # 1 for zeros: no state worth using
    return power.clamp(min=LEAST_FLOOR).float()


class SecondMoments:
    """Reads the second moments of a model's parameters from the state of its optimizer."""

    def __init__(self, optimizer: object, params: Mapping[str, Tensor]) -> None:
        """`params` are the model's, by name, as the optimizer has them.

        Raises:
            RegisterError: For an optimizer that has no second moments, or not the same ones on all ranks, or that
                steps none of these parameters.
        """
        self.optimizer, self._params, self._warned = _checked(optimizer), params, False
        own = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        if not any(id(param) in own for param in params.values()):
            raise RegisterError(
                "the optimizer steps none of the model's parameters, so its state cannot help to encode their "
                "gradients; pass the optimizer of this model"
            )

    def present(self) -> list[tuple[str, Tensor]]:
        """The second moments that there are now, by parameter name."""
        states = ((name, self.optimizer.state.get(param)) for name, param in self._params.items())
        found = ((name, second_moment(state)) for name, state in states if state)
        return [(name, local_values(moment)) for name, moment in found if moment is not None]

    def for_bucket(self, step: int) -> Callable[[Segment], SecondMoment | None]:
        """`Bucket.moment_of` for a bucket of this step. Chunks in several threads share what it reads."""
        if step >= WARMUP and not self.optimizer.state and not self._warned:
            self._warned = True
            log.warning(
                "whiten=true: %s has no state after %d steps, so gradients travel as without it; is this the optimizer "
                "whose step() you call?",
                type(self.optimizer).__name__,
                step,
            )
        lock, kept = threading.Lock(), dict[str, SecondMoment | None]()

        def moment_of(segment: Segment) -> SecondMoment | None:
            with lock:
                if segment.name not in kept:
                    kept[segment.name] = self._read(segment)
            whole = kept[segment.name]
            if whole is None:
                return None
            values = whole.values[segment.start : segment.start + segment.numel]
            if values.numel() < segment.numel:  # a shard of FSDP2 that is shorter than the others
                values = torch.nn.functional.pad(values, (0, segment.numel - values.numel()))
            return SecondMoment(values, whole.floor)

        return moment_of

    def _read(self, segment: Segment) -> SecondMoment | None:
        param = self._params.get(segment.name, segment.param)  # that of a shard is a mere shape
        state = self.optimizer.state.get(param)
        if not state:
            return None
        moment = second_moment(state)
        if moment is None:
            raise ExchangeError(
                f"whiten=true: the state of {segment.name!r} in {type(self.optimizer).__name__} holds no second moment "
                f"(it has {', '.join(map(str, state))}; known are {', '.join(MOMENTS)}); use a hook without whiten"
            )
        local = local_values(param)
        values = flattened(local_values(moment).to(local.device), local)
        values = values if values.dtype in (torch.float32, torch.float64) else values.float()
        return SecondMoment(values, floor_of(values))


def _checked(optimizer: object) -> Optimizer:
    """The optimizer; raises RegisterError if its class can have no second moments, or splits them over the ranks."""
    if not isinstance(optimizer, Optimizer):
        raise RegisterError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    inner: object = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer):  # wrappers of training libraries
        inner = inner.optimizer  # type: ignore[attr-defined]
    names = [kind.__name__ for kind in type(inner).__mro__]
    if "ZeroRedundancyOptimizer" in names:
        raise RegisterError(
            "whiten=true needs the state of all parameters on every rank, and ZeroRedundancyOptimizer splits it; use a "
            "plain optimizer, or a hook without whiten"
        )
    if names[0] in WITHOUT:
        raise RegisterError(
            "whiten=true divides by the second moment of Adam, AdamW, RMSprop, Adagrad or Adafactor, and "
            f"{names[0]} keeps none; use a hook without whiten"
        )
    return optimizer


def second_moment(state: Mapping[str, Any]) -> Tensor | None:
    """The second moment in the state of one parameter, as large as the parameter; None if there is none."""
    for name in MOMENTS:
        if isinstance(state.get(name), Tensor):
            found: Tensor = state[name]
            return found
    rows, columns = state.get("row_var"), state.get("col_var")
    if not isinstance(rows, Tensor) or not isinstance(columns, Tensor):
        return None
    mean = rows.sum(dim=-2, keepdim=True, dtype=torch.float64)  # rounded for the reason that `floor_of` gives
    return rows * (columns / torch.ldexp(torch.ones_like(mean), torch.frexp(mean).exponent).float())
