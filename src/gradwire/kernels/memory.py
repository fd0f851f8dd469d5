"""Memory for kernels: work space that jobs use over and over, and the rows of a matrix as one flat array.

In steady state a training step allocates nothing on the host. Large blocks that are malloc'ed and freed every step go
back to the operating system and return as zeroed pages; on a busy host those page faults cost more than the encoding. A
worker thread opens a `Scratch` once, and `empty` and `temp` take from it without the exchanges knowing. In any other
thread, on accelerators and under torch.compile they are plain `torch.empty`.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_here = threading.local()


class Usage:
    """How much memory somebody holds, and the most that it was. Called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now_bytes = self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        """So much more is held, or less if it is negative."""
        with self._lock:
            self.now_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def restart(self) -> None:
        """Forget the peak."""
        with self._lock:
            self.peak_bytes = self.now_bytes


class Scratch:
    """The blocks of one thread."""

    def __init__(self, usage: Usage | None = None) -> None:
        """What it holds is counted in `usage`."""
        self._free: list[Tensor] = []
        """What the last job has used, and this one has not taken yet."""
        self._taken: list[Tensor] = []
        self._spare: list[Tensor] = []
        """What this job has taken and released again."""
        self._temp = torch.empty(0, dtype=torch.uint8)
        self._usage = usage or Usage()

    def take(self, nbytes: int) -> Tensor:
        """A block of `nbytes` until the job ends."""
        if (spare := next((block for block in self._spare if nbytes <= block.numel()), None)) is not None:
            self._spare = [other for other in self._spare if other is not spare]
            return spare[:nbytes]
        fitting = [block for block in self._free if nbytes <= block.numel() <= 2 * nbytes + 4096]
        block = min(fitting, key=Tensor.numel) if fitting else self._instead(nbytes)
        self._free = [other for other in self._free if other is not block]
        self._taken.append(block)
        return block[:nbytes]

    def release(self, start: int) -> None:
        """The job no longer needs the block that begins at this address, and may take it again."""
        self._spare += [block for block in self._taken if block.data_ptr() == start]

    def temp(self, nbytes: int) -> Tensor:
        """A block of `nbytes` until `temp` is called again."""
        if self._temp.numel() < nbytes:
            self._usage.add(-self._temp.numel())
            self._temp = self._new(nbytes)
        return self._temp[:nbytes]

    def _instead(self, nbytes: int) -> Tensor:
        """A new block in place of one that does not fit: a job never holds more than it or the last one needs."""
        if self._free:
            dropped = max(self._free, key=Tensor.numel)
            self._free = [other for other in self._free if other is not dropped]
            self._usage.add(-dropped.numel())
        return self._new(nbytes)

    def _new(self, nbytes: int) -> Tensor:
        self._usage.add(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def job(self) -> Iterator[None]:
        """What is taken inside is free again afterwards. Blocks that the job did not need are dropped."""
        _here.scratch = self
        try:
            yield
        finally:
            _here.scratch = None
            self._usage.add(-sum(map(Tensor.numel, self._free)))
            self._free, self._taken, self._spare = self._taken, [], []


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like `torch.empty`; inside a job the memory is the job's, and is used again after it."""
    scratch = _current(device)
    if scratch is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return scratch.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def release(tensor: Tensor) -> None:
    """A job no longer needs what `empty` has given it: the next calls of `empty` may use the memory."""
    if (scratch := _current(tensor.device)) is not None and tensor.numel():
        scratch.release(tensor.data_ptr())


def temp(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like `empty`, for values that nobody needs once `temp` is called again."""
    scratch = _current(device)
    if scratch is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return scratch.temp(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _current(device: torch.device) -> Scratch | None:
    if torch.compiler.is_compiling() or device.type != "cpu":
        return None
    return getattr(_here, "scratch", None)


def rows_of(wires: Tensor) -> tuple[Any, int, int]:
    """The rows of a matrix for a Numba kernel: one flat array, the distance between two rows, and their number."""
    count, width = wires.shape
    stride = wires.stride(0) if count > 1 else width
    return wires.as_strided(((count - 1) * stride + width,), (1,)).numpy(), stride, count
