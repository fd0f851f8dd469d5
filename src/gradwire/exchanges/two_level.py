"""Two levels: one exchange inside a node, where the network is fast, and another across nodes, where it is slow.

    node 0   rank 0 [ a | b ]  \\ mean inside   rank 0 [ a |   ]  <- across ->  rank 2 [ a |   ]  \\ gather inside
             rank 1 [ a | b ]  /               rank 1 [   | b ]  <- across ->  rank 3 [   | b ]  /

Each rank of a node sends its own part across, so that a node sends every value once, however many ranks it has.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.errors import SpecError
from gradwire.exchanges.base import Comm, Exchange, Levels
from gradwire.exchanges.bucket import Bucket, cut
from gradwire.exchanges.feedback import fed_back
from gradwire.exchanges.reference import Reference, fed, join, kept
from gradwire.exchanges.simulated import simulate
from gradwire.kernels.memory import empty
from gradwire.spec import NestedSpec, write


@dataclass(frozen=True, slots=True)
class TwoLevel(Exchange):
    """`inside` among the ranks of a node, then `across` among the nodes. Feedback covers what `across` loses."""

    inside: Exchange
    across: Exchange
    node: int | None = None
    """The number of ranks of a node, which are consecutive. By default LOCAL_WORLD_SIZE, which torchrun sets."""

    def __post_init__(self) -> None:
        for place, part in (("inside", self.inside), ("across", self.across)):
            if not part.averages:
                raise SpecError(f"two_level: {place}={part} does not average; use exact, or a hook that compresses")
            if part.align == 0 or isinstance(part, TwoLevel):
                raise SpecError(f"two_level: {place}={part} cannot be a part of it; use exact, or a codec such as int4")
        if self.inside.takes_residual:
            raise SpecError(f"two_level: feedback is for the slow level; inside={self.inside} must go without")
        if self.node is not None and self.node < 1:
            raise SpecError(f"two_level: node, the number of ranks of a node, must be at least 1, got {self.node}")

    def levels(self, size: int) -> Levels:
        """How `size` ranks are split, and the lanes that each level needs."""
        node = self.node or int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        if node < 1 or size % node:
            problem = f"{size} ranks do not split into nodes of {node}" if node else "LOCAL_WORLD_SIZE is not set"
            raise SpecError(f"two_level: {problem}; give the number of ranks per node, as in 'two_level:node=8'")
        return Levels(node, self.inside.lanes + 1, self.across.lanes)

    @property
    def takes_residual(self) -> bool:
        """If the slow level uses feedback."""
        return self.across.takes_residual

    @property
    def align(self) -> int:
        """Whole blocks for both."""
        return math.lcm(self.inside.align, self.across.align)

    def chunk_bytes(self, size: int) -> int:
        """That of the slow level."""
        return self.across.chunk_bytes(size)

    @property
    def reads_optimizer(self) -> bool:
        """If one of the levels does."""
        return self.inside.reads_optimizer or self.across.reads_optimizer

    @property
    def warmup(self) -> int:
        """Until both levels have ended theirs."""
        return max(self.inside.warmup, self.across.warmup)

    def bound(self, size: int) -> float | None:
        """The errors of both levels, one after the other."""
        inside, across = self.inside.bound(size), self.across.bound(size)
        if inside is None or across is None:
            return None
        return inside + across * (1.0 + inside)

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        """1. Mean inside, with the residuals.  2. Mean of the own part across.  3. Gather the parts inside."""
        inside, across = comm.levels
        with fed_back(bucket.flat, residual) as work:
            if inside.size > 1:
                self.inside.mean_(dataclasses.replace(bucket, flat=work), inside)
            share = self._share(work.numel(), inside.size, across.size)
            begin = min(share * inside.rank, work.numel())
            own = slice(begin, min(begin + share, work.numel()))
            part = dataclasses.replace(bucket, flat=work[own], segments=cut(bucket.segments, own.start, own.stop))
            lost = None if residual is None else residual.zero_()[own]
            if across.size > 1:
                self.across.mean_(part, across, lost)
            if lost is not None:  # one rank keeps it for its whole node: undivided, that is `inside.size` times as much
                lost.mul_(inside.size)
            if inside.size > 1:
                _gather_(work, part.flat, share, inside)

    def reference(self, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None = None) -> Reference:
        """The references of both levels, one after the other: bit for bit where both are."""
        size, first, node = len(buckets), buckets[0], self.levels(len(buckets)).node
        values = [b.flat if residuals is None else fed(b, residuals[i]) for i, b in enumerate(buckets)]
        works = [dataclasses.replace(bucket, flat=x) for bucket, x in zip(buckets, values, strict=True)]
        inside = [_reference(self.inside, works[begin : begin + node], None) for begin in range(0, size, node)]
        numel, left, parts = values[0].numel(), [torch.zeros_like(x) for x in values], []
        share = self._share(numel, node, len(inside))
        for place in range(node):
            begin, end = (min(share * border, numel) for border in (place, place + 1))
            means = [dataclasses.replace(works[0], flat=mean.mean[begin:end]) for mean in inside]
            means = [dataclasses.replace(mean, segments=cut(first.segments, begin, end)) for mean in means]
            off = join(inside).tolerance.view(len(inside), -1)[:, begin:end].amax(0)
            parts.append(self._across_reference(means, off, size))
            for number, lost in enumerate(parts[-1].residuals or ()):
                left[number * node + place][begin:end] = lost * node
        whole = join(parts)
        mean = whole.mean.to(first.flat.dtype)
        return Reference(mean, whole.tolerance, kept(mean, residuals, left))

    def _across_reference(self, means: Sequence[Bucket], off: Tensor, size: int) -> Reference:
        """Of one part. Where the level inside is only known within `off`, a value may be rounded to the next code."""
        zeros = [torch.zeros_like(mean.flat, dtype=torch.float32) for mean in means] if self.takes_residual else None
        result = _reference(self.across, means, zeros)
        if off.any() and len(means) > 1:
            largest = max(float(mean.flat.nan_to_num(0.0, 0.0, 0.0).abs().max()) for mean in means)
            off = off + size * largest * min(self.across.bound(len(means)) or 0.0, 1.0)
        return dataclasses.replace(result, tolerance=result.tolerance + off)

    def _share(self, numel: int, node: int, nodes: int) -> int:
        """The number of values of a part: whole blocks, the same for every rank of a node."""
        unit = self.across.align * nodes
        return -(-numel // (node * unit)) * unit

    def check(self, params: Sequence[tuple[str, Tensor]]) -> None:
        """Check both parts."""
        for part in (self.inside, self.across):
            part.check(params)

    def warm_up(self, device: torch.device) -> None:
        """Warm up both parts."""
        for part in (self.inside, self.across):
            part.warm_up(device)

    def __str__(self) -> str:
        parts: dict[str, object] = {"inside": NestedSpec(str(self.inside)), "across": NestedSpec(str(self.across))}
        return write("two_level", parts if self.node is None else {**parts, "node": self.node})


def _reference(part: Exchange, buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None) -> Reference:
    """The reference of one level; a level of one rank has nothing to do."""
    if len(buckets) > 1:
        return part.reference(buckets, residuals) or simulate(part, buckets, residuals)
    return Reference(buckets[0].flat, torch.zeros(()), None if residuals is None else tuple(residuals))


def _gather_(flat: Tensor, own: Tensor, share: int, inside: Comm) -> None:
    """Send every rank's part to every rank of the node, bit for bit."""
    message = empty((share,), flat.dtype, flat.device)
    message[: own.numel()].copy_(own)
    flat.copy_(inside.all_gather(message).view(-1)[: flat.numel()])
