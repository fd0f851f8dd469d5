"""Handover: the state of a training, from a rank that has it to ranks that join.

A state is nested mappings, lists, numbers, text and tensors. Its structure travels as JSON through the store, and all
tensors as one tensor of bytes. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.engine.gloo import Gloo
from gradwire.errors import StateError


def packed(state: Any) -> tuple[str, Tensor]:
    """The structure of a state, and the bytes of its tensors; raises StateError for what is none of the above."""
    tensors: list[Tensor] = []
    text = json.dumps(_described(state, tensors))
    return text, torch.cat([torch.empty(0, dtype=torch.uint8), *map(_octets, tensors)])


def unpacked(text: str, octets: Tensor) -> Any:
    """The state again, on the CPU."""
    described = json.loads(text)
    sizes = [math.prod(shape) * _dtype(dtype).itemsize for dtype, shape in _tensors(described)]
    return _restored(described, iter(octets.split(sizes)))


def byte_count(text: str) -> int:
    """How many bytes the tensors of a state have."""
    return sum(math.prod(shape) * _dtype(dtype).itemsize for dtype, shape in _tensors(json.loads(text)))


def send(group: Gloo, octets: Tensor) -> None:
    """Copy the bytes of rank 0 to all ranks of the group, which pass zeros."""
    if octets.numel():
        group.all_reduce(octets).wait()


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """As JSON, in which a list is a kind and what it holds. JSON has neither tuples nor keys that are numbers."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", [str(value.dtype).removeprefix("torch."), list(value.shape)]]
    if isinstance(value, Mapping):
        return ["dict", [[_described(key, tensors), _described(item, tensors)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [_described(item, tensors) for item in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StateError(f"a state holds tensors, numbers and text, not {type(value).__name__}")


def _tensors(described: Any) -> Iterator[tuple[str, list[int]]]:
    """Type and shape of each tensor, in order."""
    if isinstance(described, list):
        kind, held = described
        if kind == "tensor":
            yield held[0], held[1]
            return
        for item in held:
            for part in item if kind == "dict" else [item]:
                yield from _tensors(part)


def _restored(described: Any, pieces: Iterator[Tensor]) -> Any:
    if not isinstance(described, list):
        return described
    kind, held = described
    if kind == "tensor":
        return next(pieces).clone().view(_dtype(held[0])).reshape(held[1])
    if kind == "dict":
        return {_restored(key, pieces): _restored(item, pieces) for key, item in held}
    items = [_restored(item, pieces) for item in held]
    return items if kind == "list" else tuple(items)


def _octets(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
