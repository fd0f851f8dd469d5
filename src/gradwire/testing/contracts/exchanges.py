"""The laws of exchanges, on ranks that are threads."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.engine.hook import Hook
from gradwire.engine.runner import LaneRunner
from gradwire.exchanges import Exchange
from gradwire.exchanges.bucket import Bucket, Memory, make_bucket
from gradwire.exchanges.reference import Reference
from gradwire.exchanges.simulated import expected
from gradwire.testing.contracts.codecs import gaussian, heavy_tailed
from gradwire.testing.threads import Rank, thread_ranks

SHAPES = ((40, 64), (50,), (33, 40), (3, 7), (700,))
SIZES = (0, 1, 5, 1000, 40_003)
INF_STEP, STEPS = 2, 4
Inputs = Callable[[int, int], list[Bucket]]
"""The buckets of a rank (first) in a step (second)."""


# -- comparing with the reference --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observed:
    """What a hook has made of one bucket on one rank."""

    chunks: Sequence[Bucket]
    """The chunks before averaging."""
    result: Tensor
    residual: Tensor | None


def check_reference(exchange: Exchange, size: int) -> None:
    """Every step gives the result of the exchange's reference, the same bits on all ranks, within the stated bound.

    The inputs are normal, layered (tensors of very different scales), heavy-tailed, zero, 16 bits wide and of ragged
    sizes, in several chunks; one step has an inf on the last rank.
    """
    everyone = thread_ranks(size, lambda rank: observe(rank, exchange, all_inputs), 60.0)
    wanted = references(exchange, everyone)
    compare(exchange, everyone, wanted)
    first = len(all_inputs(0, 0))
    for ranks in zip(*(own[:first] for own in everyone), strict=True):  # the first step has no residual yet
        if exchange.averages:
            _check_bound(exchange, [torch.cat([c.flat for c in own.chunks]) for own in ranks], ranks[0].result)


def check_many_in_flight(exchange: Exchange, size: int) -> None:
    """Dozens of buckets at once, step after step: each gets its own result, whatever the threads do."""

    def inputs(rank: int, step: int) -> list[Bucket]:
        return [_bucket(gaussian(100 + 137 * i, seed=step + rank), i) for i in range(24)]

    everyone = thread_ranks(size, lambda rank: observe(rank, exchange, inputs, steps=2, chunk_bytes=1024), 60.0)
    compare(exchange, everyone, references(exchange, everyone))


def observe(
    rank: Rank,
    exchange: Exchange,
    inputs: Inputs,
    *,
    steps: int = STEPS,
    chunk_bytes: int = 16_384,
    runner: LaneRunner | None = None,
) -> list[Observed]:
    """Average the buckets of some steps through a hook of its own, on a runner of its own or on this one."""
    return observe_hook(rank.hook(exchange, chunk_bytes=chunk_bytes, runner=runner), inputs, steps=steps)


def observe_hook(hook: Hook, inputs: Inputs, *, steps: int = STEPS) -> list[Observed]:
    """Average the buckets of some steps through a hook."""
    seen = []
    for step in range(steps):
        buckets, chunks = _inputs_of(hook, hook.rank, step, inputs)
        for bucket in buckets:
            hook.begin(bucket)
        hook.steps = step + 1
        for future in [hook.mean(bucket) for bucket in buckets]:
            future.wait()
        kept = hook.state_dict()["residuals"]
        for bucket, before in zip(buckets, chunks, strict=True):
            residual = torch.cat([kept[name] for name in bucket.names]) if bucket.names[0] in kept else None
            seen.append(Observed(before, bucket.flat, residual))
    return seen


def unobserved(hook: Hook, rank: int, inputs: Inputs, *, steps: int = STEPS) -> list[Observed]:
    """What `observe_hook` begins with on another rank: its chunks, and the gradients before averaging."""
    each = [_inputs_of(hook, rank, step, inputs) for step in range(steps)]
    return [Observed(parts, bucket.flat, None) for step in each for bucket, parts in zip(*step, strict=True)]


def _inputs_of(hook: Hook, rank: int, step: int, inputs: Inputs) -> tuple[list[Bucket], list[list[Bucket]]]:
    """The buckets of a rank in a step, and copies of them, cut into chunks."""
    buckets = inputs(rank, step)
    if step == INF_STEP and rank == hook.size - 1:
        for bucket in buckets:
            bucket.flat[bucket.flat.numel() // 2 :][:1] = math.inf
    copies = [dataclasses.replace(bucket, flat=bucket.flat.clone(), step=step) for bucket in buckets]
    return buckets, [hook.chunks(copy) for copy in copies]


def references(exchange: Exchange, everyone: Sequence[Sequence[Observed]]) -> list[Reference | None]:
    """The reference of every observation, from the inputs of all ranks; None where there is none."""
    wanted: list[Reference | None] = []
    memory, residuals = Memory(), dict[tuple[str, ...], Sequence[Tensor] | None]()
    for ranks in zip(*everyone, strict=True):
        if len(ranks) == 1 or not exchange.averages:
            wanted.append(None)
            continue
        names = tuple(name for chunk in ranks[0].chunks for name in chunk.names)
        numel = ranks[0].result.numel()
        zeros = [torch.zeros(numel) for _ in ranks] if exchange.takes_residual else None
        chunks = [[dataclasses.replace(chunk, memory=memory) for chunk in own.chunks] for own in ranks]
        result = expected(exchange, chunks, residuals.get(names, zeros)) if numel else None
        residuals[names] = None if result is None else result.residuals
        wanted.append(result)
    return wanted


def compare(exchange: Exchange, everyone: Sequence[Sequence[Observed]], wanted: Sequence[Reference | None]) -> None:
    """Raise AssertionError unless every observation is that of its reference, with the same bits on all ranks."""
    for number, (result, *ranks) in enumerate(zip(wanted, *everyone, strict=True)):
        for rank, own in enumerate(ranks):
            what = f"{exchange}, bucket {number}, rank {rank} of {len(ranks)}"
            if len(ranks) == 1 or not exchange.averages:
                before = torch.cat([chunk.flat for chunk in own.chunks])
                assert same_bits(own.result, before), f"{what}: the gradients have changed"
                continue
            assert same_bits(own.result, ranks[0].result), f"{what}: the bits differ from rank 0"
            if result is not None:
                text = (rank == 0 and result.difference(own.result)) or result.residual_difference(rank, own.residual)
                assert not text, f"{what}: {text}"


def all_inputs(rank: int, step: int) -> list[Bucket]:
    """Buckets of every kind, for one rank and step."""
    kinds = [input_of(rank, step, index) for index in range(5)]
    sizes = SIZES if step < 2 else ()
    return [*kinds, *(_bucket(gaussian(n, seed=100 * step + rank, scale=10.0**rank), 10 + n) for n in sizes)]


def input_of(rank: int, step: int, kind: int = 1) -> Bucket:
    """A bucket of normal (0), layered (1), heavy-tailed (2), zero (3) or bfloat16 (4) values; ranks differ in scale."""
    grads = []
    for place, shape in enumerate(SHAPES):
        make = heavy_tailed if kind == 2 else gaussian
        values = make(math.prod(shape), seed=1000 * step + 10 * rank + place).view(shape) * (1.0 + 0.5 * rank)
        scale = {1: 10.0 ** (2 - 2 * place), 3: 0.0}.get(kind, 1.0)
        grads.append((values * scale).to(torch.bfloat16 if kind == 4 else torch.float32))
    return make_bucket(grads, [f"{kind}.{place}" for place in range(len(grads))], kind)


def _check_bound(exchange: Exchange, inputs: Sequence[Tensor], result: Tensor) -> None:
    doubles, bound = torch.stack(list(inputs)).double(), exchange.bound(len(inputs))
    assert bound is not None, f"{exchange} averages, so it must state a bound"
    rms = float(doubles.square().sum(1).mean().sqrt()) or 1.0
    error, slack = float((result.double() - doubles.mean(0)).norm()) / rms, len(inputs) * torch.finfo(result.dtype).eps
    assert error <= bound + slack, f"{exchange}: error {error:.3g} of {result.numel()} values, bound {bound:.3g}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN included."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# -- laws --------------------------------------------------------------------------------------------------------------


def check_non_finite_reaches_all(exchange: Exchange, size: int) -> None:
    """An inf or NaN on one rank is in every rank's average."""

    def run(rank: Rank) -> list[Tensor]:
        hook, buckets = rank.hook(exchange, chunk_bytes=16_384), []
        for index, bad in enumerate((math.inf, math.nan)):
            values = gaussian(5000, seed=rank.rank)
            values[1234] = bad if rank.rank == size - 1 else values[1234]
            buckets.append(_bucket(values, index))
            hook.mean(buckets[-1]).wait()
        return [bucket.flat for bucket in buckets]

    everyone = thread_ranks(size, run)
    for means in everyone if exchange.averages else everyone[-1:]:
        assert not any(torch.isfinite(mean[1234]) for mean in means)


def check_conservation(exchange: Exchange, size: int) -> None:
    """With feedback: what was averaged plus what is kept is what came in, step after step.

    For gradients of 16 bits, up to the rounding of the averages themselves.
    """
    if not exchange.takes_residual:
        return
    steps, numel = 4, 3001
    for dtype, slack in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)):
        outcomes = thread_ranks(size, lambda rank, dtype=dtype: _with_feedback(rank, exchange, steps, numel, dtype))  # type: ignore[misc]
        emitted = torch.stack(outcomes[0][0]).double().sum(0)
        kept = torch.stack([residual for _, residual in outcomes]).double().mean(0)
        inputs = [[_input(rank, step, numel).to(dtype) for rank in range(size)] for step in range(steps)]
        came_in = sum(torch.stack(ranks).double().mean(0) for ranks in inputs)
        assert float((emitted + kept - came_in).abs().max()) <= steps * size * slack, dtype


def check_residual_survives_inf(exchange: Exchange, size: int) -> None:
    """A step with an inf leaves the residual as it was, whatever the gradients' type."""
    if not exchange.takes_residual:
        return
    dtypes = (torch.float32, torch.float64, torch.bfloat16)

    def run(rank: Rank) -> list[torch.dtype]:
        wrong = []
        for dtype in dtypes:
            hook = rank.hook(exchange)
            hook.steps = exchange.warmup + 1
            hook.mean(_bucket(_input(rank.rank, 0, 2000).to(dtype))).wait()
            before = _residual(hook)
            bad = _input(rank.rank, 1, 2000).to(dtype)
            bad[7] = math.inf if rank.rank == 0 else bad[7]
            hook.mean(_bucket(bad)).wait()
            lossy = bool(before.any()) or dtype == torch.bfloat16  # which fp16 carries as it is
            if not lossy or not torch.equal(before, _residual(hook)):
                wrong.append(dtype)
        return wrong

    assert not any(thread_ranks(size, run)), "the residual is not what it was before the inf"


def check_traffic(exchange: Exchange, size: int) -> None:
    """What a rank sends does not grow with the ranks: never more than a float32 all-reduce."""

    def run(rank: Rank) -> float:
        hook = rank.hook(exchange)
        bucket = _bucket(gaussian(60_000))
        hook.begin(bucket)
        hook.mean(bucket).wait()
        return hook.stats().sent_bytes

    limit = 60_000 * 4 * 2 * (size - 1) / size
    assert all(sent <= limit for sent in thread_ranks(size, run))


def _bucket(values: Tensor, index: int = 0) -> Bucket:
    """A square matrix, and one row with what is left: vectors may be exempt from coding."""
    side = math.isqrt(values.numel())
    square, row = values.split([side * side, values.numel() - side * side])
    return make_bucket([square.view(side, side), row.view(1, -1)], [f"{index}.square", f"{index}.row"], index)


def _residual(hook: Hook) -> Tensor:
    """What is kept for a bucket, in its order."""
    kept = hook.state_dict()["residuals"]
    return torch.cat([kept["0.square"], kept["0.row"]])


def _input(rank: int, step: int, numel: int) -> Tensor:
    return gaussian(numel, seed=100 * rank + step)


def _with_feedback(
    rank: Rank, exchange: Exchange, steps: int, numel: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    hook, means = rank.hook(exchange, chunk_bytes=4096), []
    for step in range(steps):
        bucket = _bucket(_input(rank.rank, step, numel).to(dtype))
        means.append(hook.mean(bucket).wait())
    return means, _residual(hook)


EXCHANGE_CHECKS: tuple[Callable[[Exchange, int], None], ...] = (
    check_reference,
    check_non_finite_reaches_all,
    check_many_in_flight,
    check_conservation,
    check_residual_survives_inf,
    check_traffic,
)


def check_exchange(exchange: Exchange, sizes: Iterable[int] = (1, 2, 3, 4)) -> None:
    """Run every contract on one exchange, on ranks that are threads.

    `check_traffic` runs on 2 ranks only, and on exchanges of one level: what may be sent beyond that is the user's
    choice, as with `shots=one`. An exchange with a `reference` is compared with it; one without is simulated, which
    shows less.

    Args:
        exchange: The exchange, for instance from `gradwire.exchange("int8")`.
        sizes: The numbers of ranks. An exchange of two levels needs multiples of its node.

    Raises:
        AssertionError: The first contract that does not hold; the text says on which bucket and rank.

    Examples:
        >>> from gradwire.testing import check_exchange
        >>> check_exchange(gradwire.exchange("int4:block=32"), sizes=(2, 3))
    """
    for size in sizes:
        for check in EXCHANGE_CHECKS:
            if check is not check_traffic or (size == 2 and exchange.levels(size) is None):
                check(exchange, size)
