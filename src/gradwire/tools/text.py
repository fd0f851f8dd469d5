"""Real data that is on every machine: the source text of Python's standard library, as bytes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradwire.errors import GradwireError

SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
"""Folders that are not the library, or are tables of numbers."""
HELD_OUT_EVERY = 16
"""One file in so many is kept for evaluation: whole files, so that nothing of them is ever trained on."""


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes to evaluate on."""

    train: Tensor
    """uint8, one-dimensional."""
    held_out: Tensor
    """uint8, one-dimensional, from other files."""


def library_text(max_bytes: int, folder: Path | None = None) -> Text:
    """The library's *.py files in the order of their names, up to `max_bytes`. The same on every rank of a machine."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left = max_bytes
    for index, path in enumerate(_sources(root)):
        source = path.read_bytes()[:left]
        parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(source)
        left -= len(source)
        if left <= 0:
            break
    return Text(*(_tensor(b"".join(part)) for part in parts))


def random_windows(source: Tensor, count: int, length: int, *seed: int) -> Tensor:
    """`count` windows of `length` bytes as (count, length) int64, drawn by `seed` alone: no global state."""
    _check_length(source, length)
    generator = torch.Generator().manual_seed(_mix(seed))
    starts = torch.randint(source.numel() - length + 1, (count,), generator=generator)
    return _windows(source, starts, length)


def even_windows(source: Tensor, count: int, length: int) -> Tensor:
    """`count` windows of `length` bytes at even distances, (count, length) int64."""
    _check_length(source, length)
    starts = torch.linspace(0, source.numel() - length, count, dtype=torch.float64).long()
    return _windows(source, starts, length)


def _sources(root: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - SKIPPED  # not walked into at all
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _windows(source: Tensor, starts: Tensor, length: int) -> Tensor:
    return source[starts[:, None] + torch.arange(length)].long()


def _check_length(source: Tensor, length: int) -> None:
    if source.numel() < length:
        raise GradwireError(
            f"the workload needs at least {length} bytes of the standard library's source, found {source.numel()}; "
            "raise text_bytes, or use a Python that was installed with its *.py files"
        )


def _mix(numbers: tuple[int, ...]) -> int:
    """One seed from several numbers, such that (0, 1) and (1, 0) have nothing in common."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")
