"""Fingerprints: a few bytes that differ if any bit of a tensor, or of a saved state, does.

They find accidents (a flipped bit, a truncated file, ranks that drifted apart), not a forger.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import StateError

WIDTH = 4096
ODD = 0x9E3779B97F4A7C1
CHECKSUM = "checksum"
DAMAGED = "the checkpoint is damaged"


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit sum over the tensor's bits that depends on their order, on the tensor's device.

    The bits are read as a matrix of 64-bit numbers. Its sums by row and by column are added up, each with an odd factor
    of its own, and the rows' with an even one besides: so a single flipped bit always changes the result.
    """
    whole, tail = _words(tensor)
    rows = whole.view(-1, WIDTH)
    by_row, by_column = _weighted(rows.sum(1)), _weighted(rows.sum(0))
    return by_row * 30 + by_column + _weighted(tail) * 31 + tensor.numel()


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bits as 64-bit numbers: as many as fill whole rows of the matrix, and the rest, one number per byte."""
    values = tensor.detach().contiguous().view(-1)
    values = torch.view_as_real(values).view(-1) if values.is_complex() else values
    octets = values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # a single value may have any stride
    if octets.storage_offset() % 8:
        octets = octets.clone()
    filled = octets.numel() // (8 * WIDTH) * (8 * WIDTH)
    return octets[:filled].view(torch.int64), octets[filled:].to(torch.int64)


def _weighted(values: Tensor) -> Tensor:
    """The sum of the values times odd numbers, modulo 2^64."""
    return (values * (torch.arange(1, values.numel() + 1, device=values.device) * (2 * ODD) + 1)).sum()


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a checksum of everything in it."""
    return {**state, CHECKSUM: checksum(state)}


def check_seal(state: Mapping[str, Any]) -> None:
    """Raise StateError if the state is not what it was when it was sealed. States of version 1 have no checksum."""
    if CHECKSUM in state and checksum(state) != state[CHECKSUM]:
        raise StateError(f"{DAMAGED}: its contents do not match its checksum; use an earlier checkpoint")


def checksum(state: Mapping[str, Any]) -> str:
    """A short text that differs if anything in the state does, apart from its own checksum."""
    parts = _described({key: value for key, value in state.items() if key != CHECKSUM})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _described(value: Any) -> Iterator[str]:
    """What a value holds, as lines of text. The order of a mapping's keys does not matter."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {int(fingerprint(value))}"
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}"
        for key in sorted(value, key=str):
            yield repr(key)
            yield from _described(value[key])
    elif isinstance(value, list | tuple):
        yield f"list of {len(value)}"
        for item in value:
            yield from _described(item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value)
    else:
        raise StateError(f"{DAMAGED}: a state holds tensors, numbers and text, not {type(value).__name__}")
