"""Bucket: a flat buffer of gradients that knows which parameter owns which values.

DDP hands gradients over in buckets; local training and tests make buckets by hand. Exchanges and the engine see only
`Bucket`. A large bucket is cut into chunks, which are buckets too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GRADIENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
"""The types that can be averaged. Complex gradients travel as pairs of real numbers."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one parameter's values inside a bucket."""

    name: str
    """The parameter's name, as in `model.named_parameters()`."""
    param: Tensor
    start: int
    """Where the run begins in the parameter's own values; 0 unless a chunk border cuts the parameter."""
    numel: int
    """Length in the bucket's (real) elements."""


Memory = dict[str, dict[str, Tensor]]


class SecondMoment(NamedTuple):
    """How large the gradients of a segment have been, for exchanges with `whiten`: they divide by its square root."""

    values: Tensor
    """The running mean of the squared gradients, one for each value of the segment, in the order of the bucket."""
    floor: Tensor
    """Added to all of them: a single number above 0, the same for the whole parameter."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of some parameters, back to back in one flat tensor. Averaging happens in place, in `flat`."""

    index: int
    flat: Tensor
    segments: tuple[Segment, ...]
    is_last: bool
    step: int = 0
    """The number of steps before this one. It seeds what is random."""
    memory: Memory | None = None
    """What an exchange keeps between steps: tensors by parameter name and key, the same on all ranks, part of the
    checkpoint. None: it may keep nothing."""
    moment_of: Callable[[Segment], SecondMoment | None] | None = None
    """The optimizer's second moment of a segment, the same bits on all ranks; None where it has none yet."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters with values here."""
        return tuple(segment.name for segment in self.segments)

    @property
    def params(self) -> tuple[Tensor, ...]:
        """The parameters with values here."""
        return tuple(segment.param for segment in self.segments)

    @property
    def grads(self) -> tuple[Tensor, ...]:
        """Views of `flat`, shaped and strided like their parameters; flat if a chunk border cuts the parameter."""
        pieces = self.flat.split([segment.numel for segment in self.segments])
        return tuple(_shaped(piece, segment) for piece, segment in zip(pieces, self.segments, strict=True))

    def chunks(self, numel: int, *, whole: bool = False) -> list[Bucket]:
        """Cut into buckets of `numel` values (the last may be shorter), in order, sharing this one's memory.

        With `whole` no tensor is cut: a chunk ends with the tensor that brings it to `numel` values or more.
        """
        if self.flat.is_sparse or self.flat.numel() <= numel:
            return [self]
        borders = self._borders(numel) if whole else [*range(0, self.flat.numel(), numel), self.flat.numel()]
        return [
            dataclasses.replace(self, flat=self.flat[begin:end], segments=cut(self.segments, begin, end))
            for begin, end in itertools.pairwise(borders)
        ]

    def _borders(self, numel: int) -> list[int]:
        ends = list(itertools.accumulate(segment.numel for segment in self.segments))
        borders = [0]
        for end in ends:
            if end - borders[-1] >= numel or (end == ends[-1] and end > borders[-1]):
                borders.append(end)
        return borders


def cut(segments: Sequence[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """The parts of `segments` that lie between two positions of the bucket."""
    parts, at = [], 0
    for segment in segments:
        low, high = max(begin - at, 0), min(end - at, segment.numel)
        if low < high:
            parts.append(Segment(segment.name, segment.param, segment.start + low, high - low))
        at += segment.numel
    return tuple(parts)


def make_bucket(grads: Sequence[Tensor], names: Sequence[str] | None = None, index: int = 0) -> Bucket:
    """A bucket made by hand, for tests and for averages of your own.

    Args:
        grads: Tensors of one floating or complex type; they are copied into one flat tensor.
        names: Their names, by default "0", "1", ...
        index: The bucket's index.

    Returns:
        A bucket. After averaging, read the means from `Bucket.grads`.

    Raises:
        ValueError: Without any tensor.
        TypeError: For tensors of another type, or of different types.

    Examples:
        >>> bucket = gradwire.make_bucket([torch.ones(3), torch.zeros(2, 2)], ["weight", "bias"])
        >>> bucket.grads[1].shape
        torch.Size([2, 2])
    """
    if not grads:
        raise ValueError("a bucket needs at least one tensor")
    for grad in grads:
        if grad.dtype not in GRADIENT_DTYPES:
            raise TypeError(f"gradients must be of a floating or complex type, got {grad.dtype}")
        if grad.dtype != grads[0].dtype:
            raise TypeError(f"the gradients of a bucket are of one type, got {grads[0].dtype} and {grad.dtype}")
    names = names or [str(i) for i in range(len(grads))]
    flat = torch.cat([_real(_memory_order(grad)) for grad in grads])
    return Bucket(index, flat, segments_of(grads, names), is_last=True)


def numel_of(param: Tensor) -> int:
    """How many values a parameter has in a bucket: complex numbers travel as pairs of real ones."""
    return param.numel() * (2 if param.is_complex() else 1)


def segments_of(params: Sequence[Tensor], names: Sequence[str]) -> tuple[Segment, ...]:
    """One whole segment per parameter, in order."""
    return tuple(Segment(name, param, 0, numel_of(param)) for name, param in zip(names, params, strict=True))


def _memory_order(tensor: Tensor) -> Tensor:
    """A flat view (or copy) of the values in DDP's order: by stride if the tensor is dense."""
    if not _dense(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _shaped(piece: Tensor, segment: Segment) -> Tensor:
    param = segment.param
    values = torch.view_as_complex(piece.view(-1, 2)) if param.is_complex() and piece.numel() % 2 == 0 else piece
    if values.numel() != param.numel():
        return piece
    stride = param.stride() if _dense(param) else torch.empty(param.shape, device="meta").stride()
    return values.as_strided(param.shape, stride)


def flattened(tensor: Tensor, param: Tensor) -> Tensor:
    """The values of a tensor with the shape of a parameter, in the order that the parameter's gradient has in a bucket.

    The result may be a view.
    """
    if _dense(param) and tensor.stride() != param.stride():
        tensor = torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)
    values = _memory_order(tensor)
    return _real(values)


def _dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of contiguous strides, which DDP keeps in its bucket."""
    at = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != at:
            return False
        at *= size
    return tensor.numel() > 0


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


class Steps:
    """Decides where a step begins, from the indices of the buckets that arrive. The only place that does."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        """The number of steps that have begun, those before a checkpoint included."""
        self.seen = 0
        """Of those, the ones that this object has seen begin."""
        self._last_index = -1

    def begins_with(self, index: int) -> bool:
        """Whether the bucket with this index would open a step.

        A step begins when the index stops rising: the last bucket of a step may never come
        (`skip_all_reduce_unused_params`).
        """
        return index <= self._last_index or self._last_index < 0

    def add(self, index: int, first: bool | None = None) -> bool:
        """Count a bucket; True if it opens a step. The caller may know better, and says so with `first`."""
        first = self.begins_with(index) if first is None else first
        self._last_index = index
        self.count += first
        self.seen += first
        return first
