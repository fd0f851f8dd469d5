"""Averaging through a codec: one-shot or two-shot, whichever suits the number of ranks, or the backend's own sum."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from gradwire.bucket import Bucket
from gradwire.codecs import Codec
from gradwire.comm import Comm
from gradwire.errors import SpecError
from gradwire.exchanges.all_reduce import all_reduce_
from gradwire.exchanges.one_shot import one_shot_
from gradwire.exchanges.two_shot import two_shot_
from gradwire.feedback import fed_back
from gradwire.spec import write

Shots = Literal["auto", "one", "two"]
Accumulate = Literal["fp32", "wire"]


@dataclass(frozen=True, slots=True)
class Coded:
    """Encode, move, sum in float32, decode."""

    codec: Codec
    _: dataclasses.KW_ONLY
    accumulate: Accumulate = "fp32"
    """`fp32`: sums in float32, so the error does not grow with the ranks. `wire`: the backend sums half precision."""
    shots: Shots = "auto"
    """`one`: all-gather. `two`: all-to-all, then all-gather. `auto`: one at 2 ranks, two above."""
    feedback: bool = False
    """Add back at the next step what this step's encoding lost."""

    def __post_init__(self) -> None:
        name = self.codec.name
        if self.accumulate == "wire" and self.codec.wire_dtype is None:
            raise SpecError(
                f"{name}: accumulate=wire is for wires the backend can sum (fp16, bf16); use accumulate=fp32"
            )
        if self.accumulate == "wire" and (self.feedback or self.shots != "auto"):
            raise SpecError(f"{name}: accumulate=wire takes neither feedback nor shots; use accumulate=fp32")

    @property
    def lanes(self) -> int:
        """Two unless one-shot (or the backend) does it all in one."""
        return 1 if self.accumulate == "wire" or self.shots == "one" else 2

    @property
    def takes_residual(self) -> bool:
        """With feedback on."""
        return self.feedback

    @property
    def align(self) -> int:
        """Whole blocks of the codec."""
        return int(getattr(self.codec, "block", 1))

    def chunk_bytes(self, size: int) -> int:
        """1 MB a rank, up to 4: smaller ones cost more wake-ups than they hide, larger ones leave the wire idle."""
        return min(4 if self.accumulate == "wire" else size, 4) << 20

    def bound(self, size: int) -> float:
        """One encoding for one-shot, two for two-shot; for `accumulate=wire` one more for each addition."""
        encodings = size if self.accumulate == "wire" else 1 if self._one_shot(size) else 2
        return 1.01 * encodings * self.codec.bound + size * 2.0**-23

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Pick the way over the wire and go."""
        flat = bucket.flat
        if flat.numel() == 0:  # an empty wire has no rows to look at
            return
        if self.accumulate == "wire":
            all_reduce_(flat, comm, self.codec.wire_dtype)
            return
        with fed_back(flat, residual):
            if self._one_shot(comm.size):
                one_shot_(flat, self.codec, comm, residual)
            else:
                two_shot_(flat, self.codec, comm, residual, self.align)

    def _one_shot(self, size: int) -> bool:
        return self.shots == "one" or (self.shots == "auto" and size <= 2)

    def __str__(self) -> str:
        return write(self.codec.name, {**_changed(self.codec), **_changed(self, skip="codec")})


def _changed(settings: Any, skip: str = "") -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults."""
    return {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.name != skip and getattr(settings, field.name) != field.default
    }
