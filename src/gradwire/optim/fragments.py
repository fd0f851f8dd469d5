"""Fragments: some parameters of a model as one flat tensor, for parameters that travel instead of gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.errors import ExchangeError, RegisterError
from gradwire.exchanges.bucket import Bucket, segments_of
from gradwire.models.checks import check_types

Named = Sequence[tuple[str, Tensor]]


class Fragment:
    """Some parameters, and how their values lie in a flat tensor: one after the other, each by its own strides.

    The flat tensor is real and of float32 at least: what travels rarely should not be rounded before it does.
    """

    def __init__(self, index: int, named: Named) -> None:
        self.index = index
        named = sorted(named, key=lambda pair: not pair[1].is_complex())  # pairs of numbers begin at even places
        self.names = tuple(name for name, _ in named)
        self.params = tuple(param for _, param in named)
        self.segments = segments_of(self.params, self.names)
        self.dtype = torch.float32
        for param in self.params:
            self.dtype = torch.promote_types(self.dtype, param.dtype.to_real())
        self.numel = sum(segment.numel for segment in self.segments)

    def flat(self) -> Tensor:
        """A new flat tensor of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.params[0].device)

    def bucket(self, flat: Tensor) -> Bucket:
        """`flat` as a bucket that an exchange can average."""
        return Bucket(self.index, flat, self.segments, is_last=True)

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """`flat` cut into views shaped like the parameters."""
        return self.bucket(flat).grads

    def read(self) -> Tensor:
        """The parameters' values, in a new flat tensor."""
        return self.copy_(self.flat(), self.params)

    def write(self, flat: Tensor) -> None:
        """Put values into the parameters, in place: types, strides and storages stay."""
        with torch.no_grad():
            for param, view in zip(self.params, self.views(flat), strict=True):
                param.copy_(view)

    def copy_(self, flat: Tensor, values: Iterable[Tensor]) -> Tensor:
        """Fill `flat` with one tensor a parameter."""
        for view, value in zip(self.views(flat), values, strict=True):
            view.copy_(value.detach())
        return flat

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A copy of what `flat` holds of each parameter."""
        return {name: view.clone() for name, view in zip(self.names, self.views(flat), strict=True)}


@dataclass(slots=True, eq=False)
class Journey:
    """An exchange of one fragment under way."""

    fragment: Fragment
    due: int
    """The step at whose end it arrives."""
    mean: Tensor
    """The mean of the deltas, once `future` is done."""
    future: Future[Tensor] | None
    started: list[Tensor]
    """The parameters at departure; empty if arrival follows at once."""


def cut(named: Named, count: int) -> list[Fragment]:
    """Whole tensors in `count` fragments of near equal size; the same cut wherever the model is the same."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for place in sorted(range(len(named)), key=lambda place: -named[place][1].numel()):
        lightest = loads.index(min(loads))
        parts[lightest].append(place)
        loads[lightest] += max(named[place][1].numel(), 1)
    return [Fragment(index, [named[place] for place in sorted(part)]) for index, part in enumerate(parts)]


def by_type(named: Named) -> list[Fragment]:
    """A fragment for each type that the values travel in, so that no value travels in a wider one than it needs."""
    parts: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, param in named:
        parts.setdefault(torch.promote_types(torch.float32, param.dtype.to_real()), []).append((name, param))
    return [Fragment(index, part) for index, part in enumerate(parts.values())]


def check_parameters(named: Named) -> torch.device:
    """Refuse parameters that cannot be averaged. Returns the device that they are on."""
    check_types(named, "parameters")
    for name, param in named:
        if param.device != named[0][1].device:
            told = f"{named[0][0]!r} is on {named[0][1].device}, {name!r} on {param.device}"
            raise RegisterError(f"the parameters must be on one device; {told}")
    return named[0][1].device


def waited(future: Future[Tensor], what: str) -> Tensor:
    """The value of an exchange's future; its failure as an error of ours."""
    try:
        return future.wait()
    except RuntimeError as error:
        raise ExchangeError(f"{what} failed: {error}") from error


def digest(named: Named) -> str:
    """A short text that is the same for the same names, shapes and types, in the same order."""
    told = repr([(name, tuple(param.shape), str(param.dtype)) for name, param in named])
    return f"{len(named)} tensors, {hashlib.sha256(told.encode()).hexdigest()[:16]}"


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the world; refused if this rank is not in it."""
    if group is None and not dist.is_initialized():
        raise RegisterError("there is no process group: call torch.distributed.init_process_group() first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):  # what new_group() gives those it leaves out
        raise RegisterError("this rank is not in the process group given; only its members may average over it")
    return found
