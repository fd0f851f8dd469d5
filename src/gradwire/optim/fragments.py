"""Fragments: some parameters of a model as one flat tensor, for averaging parameters instead of gradients."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.errors import ExchangeError, RegisterError, SpecError
from gradwire.exchanges.bucket import Bucket, segments_of
from gradwire.models.checks import check_types

Named = Sequence[tuple[str, Tensor]]


class Fragment:
    """Some parameters, and the layout of their values in a flat tensor: one after the other, each by its own strides.

    The flat tensor is real and at least float32: values that are averaged rarely should not be rounded before.
    """

    def __init__(self, index: int, named: Named) -> None:
        self.index = index
        named = sorted(named, key=lambda pair: not pair[1].is_complex())  # pairs of numbers start at even positions
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
        """The values of the parameters in a new flat tensor."""
        return self.copy_(self.flat(), self.params)

    def write(self, flat: Tensor) -> None:
        """Copy values into the parameters, which keep their types, strides and storages."""
        with torch.no_grad():
            for param, view in zip(self.params, self.views(flat), strict=True):
                param.copy_(view)

    def copy_(self, flat: Tensor, values: Iterable[Tensor]) -> Tensor:
        """Fill `flat` with one tensor per parameter."""
        for view, value in zip(self.views(flat), values, strict=True):
            view.copy_(value.detach())
        return flat

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A copy of each parameter's part of `flat`."""
        return {name: view.clone() for name, view in zip(self.names, self.views(flat), strict=True)}


def cut(named: Named, count: int) -> list[Fragment]:
    """Divide whole tensors into `count` fragments of similar size. The result depends on the model only."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for place in sorted(range(len(named)), key=lambda place: -named[place][1].numel()):
        lightest = loads.index(min(loads))
        parts[lightest].append(place)
        loads[lightest] += max(named[place][1].numel(), 1)
    return [Fragment(index, [named[place] for place in sorted(part)]) for index, part in enumerate(parts)]


def by_type(named: Named) -> list[Fragment]:
    """One fragment per type that values are sent in, so that no value is sent in a wider type than it needs."""
    parts: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, param in named:
        parts.setdefault(torch.promote_types(torch.float32, param.dtype.to_real()), []).append((name, param))
    return [Fragment(index, part) for index, part in enumerate(parts.values())]


def check_parameters(named: Named) -> torch.device:
    """Return the device of the parameters; raise RegisterError if they cannot be averaged."""
    check_types(named, "parameters")
    for name, param in named:
        if param.device != named[0][1].device:
            devices = f"{named[0][0]!r} is on {named[0][1].device}, {name!r} on {param.device}"
            raise RegisterError(f"the parameters must be on one device; {devices}")
    return named[0][1].device


def wait_for(future: Future[Tensor], what: str) -> Tensor:
    """The value of an exchange's future; raises ExchangeError if it failed."""
    try:
        return future.wait()
    except RuntimeError as error:
        raise ExchangeError(f"{what} failed: {error}") from error


def digest(named: Named) -> str:
    """A short text that is the same for the same names, shapes and types, in the same order."""
    text = repr([(name, tuple(param.shape), str(param.dtype)) for name, param in named])
    return f"{len(named)} tensors, {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def whole(name: str, value: int, least: int) -> int:
    """Return the value; raise SpecError if it is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the world if it is None; raises RegisterError if this rank is not in it."""
    if group is None and not dist.is_initialized():
        raise RegisterError("there is no process group: call torch.distributed.init_process_group() first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # new_group() returns a number on ranks that are not members
        raise RegisterError("this rank is not in the process group given; only its members may average over it")
    return group
