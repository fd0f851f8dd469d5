"""Coded: averaging through a codec, one-shot or two-shot as suits the number of ranks, or by the backend's sum."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.errors import SpecError
from gradwire.exchanges import whiten as whitening
from gradwire.exchanges.allocate import BLOCK, CODECS, allocated_mean_, allocated_reference
from gradwire.exchanges.base import Comm, Exchange
from gradwire.exchanges.bucket import Bucket, Segment
from gradwire.exchanges.exact import all_reduce_, exact_mean_
from gradwire.exchanges.exempt import check_matches, check_pattern, is_exempt
from gradwire.exchanges.feedback import fed_back, widened
from gradwire.exchanges.plan import Run, WirePlan, joined, one_shot_, plan, two_shot_
from gradwire.exchanges.reference import Reference, backend_mean, coded_message, exact_reference, fed, kept
from gradwire.kernels.batch import Entry
from gradwire.spec import changed, write

Shots = Literal["auto", "one", "two"]
Accumulate = Literal["fp32", "wire"]
Residual = Literal["fp32", "int8"]


@dataclass(frozen=True, slots=True)
class Coded(Exchange):
    """Encode, communicate, sum in float32, decode."""

    codec: Codec
    _: dataclasses.KW_ONLY
    accumulate: Accumulate = "fp32"
    """`fp32`: sum in float32, so that the error does not grow with the ranks. `wire`: the backend sums in 16 bits."""
    shots: Shots = "auto"
    """`one`: all-gather. `two`: all-to-all, then all-gather. `auto`: one at 2 ranks, two above."""
    feedback: bool | None = None
    """Error feedback: add back at the next step what this step's encoding lost. By default only topk does."""
    residual: Residual = "fp32"
    """How feedback keeps what was lost, for sharded models, where it is as large as the whole model on every rank:
    `fp32`, or `int8` with 8 bits per value."""
    exempt: str | None = None
    """Tensors that travel in float32: `auto` (one dimension, or under 1024 values), `none`, or a pattern of names such
    as `norm|bias|head`. By default `auto` for codecs of 6 bits or less."""
    allocate: bool = False
    """Give each block of 256 values its own width of 1 to 8 bits, by its energy in past steps, with the same number of
    bits on average (int2 to int6, on the CPU)."""
    fairness: float = 0.5
    """For `allocate`, from 0 to 1: 1 is best for the gradient as a whole, less favours tensors of little energy."""
    whiten: bool = False
    """Encode the gradient divided by the root of the optimizer's second moment, so that the error is equal in units of
    Adam's updates. The first 15 steps are exact. Pass `optimizer=...` to `gradwire.register`."""

    def __post_init__(self) -> None:
        name = self.codec.name
        for field, value in _defaults(self.codec).items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        if self.accumulate == "wire" and self.codec.wire_dtype is None:
            raise SpecError(
                f"{name}: accumulate=wire is for wires the backend can sum (fp16, bf16); use accumulate=fp32"
            )
        if self.accumulate == "wire" and (self.feedback or self.shots != "auto" or self.exempt != "none"):
            raise SpecError(f"{name}: accumulate=wire takes neither feedback nor shots nor exempt; use accumulate=fp32")
        if self.allocate and (not self.codec.allocatable_bits or self.feedback):
            raise SpecError(f"{name}: allocate=true is for int2 to int6, without feedback")
        if self.whiten and (self.allocate or self.codec.wire_dtype is not None):
            raise SpecError(
                f"{name}: whiten=true is for codecs with blocks (int2 to int8, sign, fp8), without allocate"
            )
        if self.residual != "fp32" and not self.feedback:
            raise SpecError(f"{name}: residual={self.residual} goes with feedback=true")
        if not 0.0 <= self.fairness <= 1.0:
            raise SpecError(f"{name}: fairness must be from 0 to 1, got {self.fairness}")
        check_pattern(name, str(self.exempt))

    @property
    def lanes(self) -> int:
        """Two, or one for one-shot and for the backend's sum."""
        return 1 if self.accumulate == "wire" or self.shots == "one" else 2

    @property
    def takes_residual(self) -> bool:
        """With feedback on."""
        return bool(self.feedback)

    @property
    def packs_residual(self) -> bool:
        """With `residual=int8`."""
        return self.residual == "int8"

    @property
    def traceable(self) -> bool:
        """Unless it keeps state between steps or needs the number of the step."""
        return not (self.feedback or self.allocate or self.whiten or self.codec.is_random)

    @property
    def reads_optimizer(self) -> bool:
        """With `whiten`."""
        return self.whiten

    @property
    def warmup(self) -> int:
        """With `whiten`, the steps until the second moment is worth using."""
        return whitening.WARMUP if self.whiten else 0

    @property
    def align(self) -> int:
        """Whole blocks of the codec."""
        return BLOCK if self.allocate else self.codec.align

    def chunk_bytes(self, size: int) -> int:
        """4 MB: smaller chunks cost more wake-ups than they hide, larger ones leave the wire idle.

        On many ranks at least 256 kB per rank, as every rank has its own part, with its own work and message.
        """
        return 4 << 20 if self.accumulate == "wire" else max(4 << 20, size << 18)

    def bound(self, size: int) -> float | None:
        """The error of one encoding for one-shot, of two for two-shot; with `accumulate=wire` one more per addition.

        With `whiten` the error is bounded in other units than those of gradients.
        """
        if self.whiten:
            return None
        error = 1.0 if self.allocate else self.codec.bound
        if self.accumulate == "wire":
            return 1.01 * size * error + size * 2.0**-23
        total = error if self._one_shot(size) else error + error * (1.0 + error)
        return 1.01 * total + size * 2.0**-23

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """Average through the backend's sum, one-shot or two-shot, as the options say."""
        flat = bucket.flat
        if flat.numel() == 0:  # an empty wire has no rows
            return
        if self.accumulate == "wire":
            all_reduce_(flat, comm, self.codec.wire_dtype)
            return
        if bucket.step < self.warmup:
            exact_mean_(flat, comm, residual)
            return
        one = self._one_shot(comm.size)
        if self.allocate:
            exempt = [self._exempts(segment) for segment in bucket.segments]
            allocated_mean_(bucket, comm, self.codec.allocatable_bits, self.fairness, exempt, one)
            return
        exchange_, split = one_shot_ if one else two_shot_, self.plan(bucket, 1 if one else comm.size)
        codec = self._seeded(bucket, comm.rank)
        if residual is None and not self.whiten:
            work = flat if flat.dtype.itemsize > 2 else widened(flat, codec)
            exchange_(work, split, codec, comm)
            if work is not flat:
                flat.copy_(work)
            return
        with fed_back(flat, residual) as work:
            if self.whiten:
                with whitening.whitened(bucket, work, residual, self._exempts) as white:
                    exchange_(white, split, codec, comm, residual)
            else:
                exchange_(work, split, codec, comm, residual)

    def reference(self, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None = None) -> Reference:
        """Bit for bit, except for the order of the sum under `accumulate=wire`, in which each addition rounds once."""
        first, size, one = buckets[0], len(buckets), self._one_shot(len(buckets))
        if self.codec.wire_dtype is not None and self.accumulate == "wire":
            return backend_mean([bucket.flat for bucket in buckets], self.codec.wire_dtype)
        if self.allocate:
            exempt = [self._exempts(segment) for segment in first.segments]
            return allocated_reference(buckets, self.codec.allocatable_bits, self.fairness, exempt, one)
        if first.step < self.warmup:
            return exact_reference(buckets, residuals)
        values = [fed(bucket, None if residuals is None else residuals[i]) for i, bucket in enumerate(buckets)]
        divisor = whitening.divisors(first, self._exempts) if self.whiten else None
        if divisor is not None:
            values = [value / divisor for value in values]
        runs = joined(self.runs(first), self.codec)
        codecs = [self.codec] * size
        if first.segments:
            start = first.segments[0]
            codecs = [self.codec.seeded(rank, first.step, start.name, start.start) for rank in range(size)]
        mean, lost = coded_message(values, [run.numel for run in runs], [run.exempt for run in runs], codecs, one)
        if divisor is not None:
            mean, lost = mean * divisor, [own * divisor for own in lost]
        mean = mean.to(first.flat.dtype)
        # Residuals are float32: those of float64 gradients round, and a value may land on the next code.
        largest = max((float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in values if x.numel()), default=0.0)
        off = size * largest * min(self.codec.bound, 1.0) if mean.dtype == torch.float64 else 0.0
        return Reference(mean, torch.tensor(off), kept(mean, residuals, lost))

    def plan(self, bucket: Bucket, parts: int) -> WirePlan:
        """Which rank averages what. Codecs with blocks see one tensor at a time."""
        return plan(self.runs(bucket), parts, self.codec)

    def warm_up(self, device: torch.device) -> None:
        """Use every kernel once."""
        if self.allocate and device.type != "cpu":
            raise SpecError(f"{self.codec.name}: allocate=true works on the CPU only, the model is on {device}")
        for codec in CODECS.values() if self.allocate else [self.codec]:
            values = torch.ones(2 * self.align + 1, device=device)
            if self.whiten:
                whitening.warm_up(values)
            if _warmed_up_at_once(codec, values, bool(self.feedback)):
                continue
            wire = codec.encode(values)
            for add in (False, True):
                codec.decode_(values, wire, add=add)
            codec.sum_(values, torch.stack([wire, wire]), 0.5)
            codec.reduce_(wire, values, torch.stack([wire, wire]), 0, 0.5)

    def check(self, params: Sequence[tuple[str, Tensor]]) -> None:
        """Raise SpecError, or warn, if `exempt` makes no sense for the model."""
        check_matches(self.codec.name, str(self.exempt), params)

    def runs(self, bucket: Bucket) -> tuple[Run, ...]:
        """The tensors of a bucket, and which of them are exempt."""
        return tuple(Run(segment.numel, self._exempts(segment)) for segment in bucket.segments)

    def _exempts(self, segment: Segment) -> bool:
        return self.exempt != "none" and is_exempt(str(self.exempt), segment)

    def _seeded(self, bucket: Bucket, rank: int) -> Codec:
        """The codec, with a seed for this rank, step and chunk if it rounds stochastically."""
        if not self.codec.is_random or not bucket.segments:
            return self.codec
        first = bucket.segments[0]
        return self.codec.seeded(rank, bucket.step, first.name, first.start)

    def _one_shot(self, size: int) -> bool:
        return self.shots == "one" or (self.shots == "auto" and size <= 2)

    def __str__(self) -> str:
        own = {key: value for key, value in changed(self).items() if value != _defaults(self.codec).get(key)}
        own.pop("codec")
        return write(self.codec.name, {**changed(self.codec), **own})


def _warmed_up_at_once(codec: Codec, values: Tensor, feedback: bool) -> bool:
    """Use the kernels of `Codec.batch` once; False if there are none."""
    batch, entries = codec.batch(values), (Entry(0, values.numel(), 0, False),)
    if batch is None:
        return False
    wires = torch.zeros((2, codec.wire_bytes(values.numel())), dtype=torch.uint8, device=values.device)
    residual = torch.zeros_like(values) if feedback else None
    return (
        batch.encode_(wires, values, entries, residual)
        and batch.reduce_(torch.empty_like(wires), values, entries, wires, 0, 0.5, residual)
        and batch.total_(values, entries, wires, 0.5, 2)
    )


def _defaults(codec: Codec) -> dict[str, object]:
    """The codec's own defaults for options of the exchange."""
    return {"feedback": codec.needs_feedback, "exempt": "auto" if codec.exempts_small else "none"}
