"""The laws that every codec and every exchange must keep, as checks that raise AssertionError.

Plug-in authors can run them over their own: `for check in CODEC_CHECKS: check(codec)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from gradwire.bucket import Bucket, make_bucket
from gradwire.codecs import Codec, decode
from gradwire.codecs.base import reduce_, sum_
from gradwire.exchanges import Exchange
from gradwire.hook import Hook
from gradwire.testing.threads import Rank, thread_ranks

SIZES = (0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 4096, 10_007)
SCALES = (1e-30, 1e-8, 1.0, 1e5, 1e30)


def gaussian(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values from a generator of their own."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


# -- codecs ----------------------------------------------------------------------------------------------------------


def check_wire_size(codec: Codec) -> None:
    """The size of the wire is known from the number of values alone, and is a multiple of 4."""
    for numel in SIZES:
        for values in (gaussian(numel), torch.zeros(numel)):
            assert codec.encode(values).numel() == codec.wire_bytes(numel), numel
        assert codec.wire_bytes(numel) % 4 == 0, numel


def check_round_trip(codec: Codec) -> None:
    """`decode(encode(x))` is within the stated bound, for every size and scale."""
    for numel in SIZES:
        for scale in SCALES:
            values = gaussian(numel, seed=numel, scale=scale)
            _check_bound(codec, values)


def check_special_values(codec: Codec) -> None:
    """Zeros are exact; constants, one spike, and the ends of float32's range are within the bound."""
    assert torch.equal(decode(codec, codec.encode(torch.zeros(300)), 300), torch.zeros(300))
    spike = torch.zeros(300)
    spike[123] = -3.0
    for values in (torch.full((300,), 0.1), torch.full((300,), -7e4), spike, torch.full((5,), 3e38), torch.ones(1)):
        _check_bound(codec, values)
    denormal = decode(codec, codec.encode(torch.full((300,), 1e-42)), 300)
    assert (denormal - 1e-42).abs().max() <= 1e-36


def check_non_finite(codec: Codec) -> None:
    """An inf or NaN among normal values comes out as inf or NaN."""
    for bad in (math.inf, -math.inf, math.nan):
        for where in (0, 150, 299):
            values = gaussian(300)
            values[where] = bad
            assert not torch.isfinite(decode(codec, codec.encode(values), 300)).all(), (bad, where)


def check_deterministic(codec: Codec) -> None:
    """The same values give the same bytes, and the global random state is not touched."""
    before = torch.random.get_rng_state()
    assert torch.equal(codec.encode(gaussian(1000)), codec.encode(gaussian(1000)))
    assert torch.equal(before, torch.random.get_rng_state())


def check_input_untouched(codec: Codec) -> None:
    """Encoding is pure."""
    values = gaussian(1000)
    codec.encode(values)
    assert torch.equal(values, gaussian(1000))


def check_decode_forms(codec: Codec) -> None:
    """`alpha`, `add` and `out` mean what they say."""
    values = gaussian(1000)
    wire, once = codec.encode(values), torch.empty(1000)
    assert codec.decode_(once, wire) is once
    wanted = codec.decode_(torch.empty(1000), wire, alpha=-0.25)
    assert torch.equal(wanted, once * -0.25)
    base = gaussian(1000, seed=1)
    assert torch.equal(codec.decode_(base.clone(), wire, alpha=-0.25, add=True), base + wanted)
    row = torch.zeros((3, codec.wire_bytes(1000)), dtype=torch.uint8)
    codec.encode(values, out=row[1])
    assert torch.equal(row[1], wire)
    assert torch.equal(decode(codec, torch.stack([wire, wire], dim=1)[:, 0], 1000), once)
    assert not row[0].any()
    assert not row[2].any()


def check_dtypes(codec: Codec) -> None:
    """Gradients of every floating type can be encoded and decoded into."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = gaussian(257).to(dtype)
        out = codec.decode_(torch.empty(257, dtype=dtype), codec.encode(values))
        error = float((out.double() - values.double()).norm() / values.double().norm())
        assert error <= codec.bound + torch.finfo(dtype).eps, (dtype, error)
        codec.decode_(out, codec.encode(values), alpha=-1.0, add=True)
        assert out.double().norm() <= torch.finfo(dtype).eps * 257, dtype


def check_no_host_sync(codec: Codec) -> None:
    """Encoding and decoding on an accelerator never wait for it: they run on fake cuda tensors, which hold no data."""
    with FakeTensorMode(), _FakeCopies():
        values = torch.empty(1000, device="cuda")
        wire = codec.encode(values)
        assert wire.device.type == "cuda"
        codec.decode_(values, wire, alpha=0.5, add=True)


def check_fused(codec: Codec) -> None:
    """`sum_` and `reduce_`, fused or not, give the bits of decoding wire after wire."""
    for numel in (1, 300, 5000):
        rows = [codec.encode(gaussian(numel, seed=seed)) for seed in range(3)]
        wide = torch.zeros((3, rows[0].numel() + 8), dtype=torch.uint8)  # rows need not be next to each other
        wide[:, 4:-4] = torch.stack(rows)
        wires, own = wide.narrow(1, 4, rows[0].numel()), gaussian(numel, seed=3)
        total, mean = torch.empty(numel), own * 0.25
        for rank, wire in enumerate(rows):
            codec.decode_(total, wire, alpha=0.25, add=rank > 0)
        for wire in (rows[0], rows[2]):
            codec.decode_(mean, wire, alpha=0.25, add=True)
        assert torch.equal(sum_(codec, torch.empty(numel), wires, 0.25), total), numel
        wire = torch.empty_like(rows[0])
        reduce_(codec, wire, own, wires, 1, 0.25)
        assert torch.equal(decode(codec, wire, numel), decode(codec, codec.encode(mean), numel)), numel


class _FakeCopies(TorchFunctionMode):
    """`copy_` and slices of fake cuda tensors, which Python's bindings refuse on a build without cuda."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[1], slice):
            return torch.ops.aten.slice.Tensor(args[0], 0, args[1].start, args[1].stop)
        return func(*args, **(kwargs or {}))


def _check_bound(codec: Codec, values: Tensor) -> None:
    error = decode(codec, codec.encode(values), values.numel()).double() - values.double()
    limit = codec.bound * float(values.double().norm()) * (1 + 1e-6)
    assert float(error.norm()) <= limit, (values.numel(), float(values.abs().max()) if values.numel() else 0)


CODEC_CHECKS: tuple[Callable[[Codec], None], ...] = (
    check_wire_size,
    check_round_trip,
    check_special_values,
    check_non_finite,
    check_deterministic,
    check_input_untouched,
    check_decode_forms,
    check_dtypes,
    check_fused,
    check_no_host_sync,
)

# -- exchanges -------------------------------------------------------------------------------------------------------


def check_mean(exchange: Exchange, size: int) -> None:
    """Bit-identical on all ranks and within the stated bound, for whole and ragged sizes and several chunks."""
    bound = exchange.bound(size)
    for numel in (0, 1, 5, 1000, 40_003):
        inputs = [gaussian(numel, seed=rank, scale=10.0**rank) for rank in range(size)]
        means = thread_ranks(size, lambda rank, xs=inputs: _mean(rank, exchange, xs[rank.rank]))  # type: ignore[misc]
        if bound is None:
            assert all(torch.equal(mean, own) for mean, own in zip(means, inputs, strict=True))
            continue
        assert all(torch.equal(mean, means[0]) for mean in means), numel
        doubles = torch.stack(inputs).double()
        rms = float(doubles.square().sum(1).mean().sqrt()) or 1.0
        error = float((means[0].double() - doubles.mean(0)).norm()) / rms
        assert error <= bound, (numel, error, bound)


def check_non_finite_reaches_all(exchange: Exchange, size: int) -> None:
    """An inf or NaN on one rank is in every rank's average."""
    for bad in (math.inf, math.nan):
        inputs = [gaussian(5000, seed=rank) for rank in range(size)]
        inputs[-1][1234] = bad
        means = thread_ranks(size, lambda rank, xs=inputs: _mean(rank, exchange, xs[rank.rank]))  # type: ignore[misc]
        assert not any(torch.isfinite(mean[1234]) for mean in means[-1 if exchange.bound(size) is None else 0 :])


def check_many_in_flight(exchange: Exchange, size: int) -> None:
    """Dozens of buckets at once, step after step: each gets its own mean, whatever the threads do."""

    def run(rank: Rank) -> list[Tensor]:
        hook, means = rank.hook(exchange, chunk_bytes=1024), []
        for step in range(2):
            buckets = [_bucket(_sized(i, step + rank.rank), i) for i in range(24)]
            for future in [hook.mean(bucket) for bucket in buckets]:
                future.wait()
            means += [bucket.flat for bucket in buckets]
        return means

    everyone = thread_ranks(size, run)
    for position, means in enumerate(zip(*everyone, strict=True)):
        step, index = divmod(position, 24)
        exact = torch.stack([_sized(index, step + rank) for rank in range(size)]).double().mean(0)
        if (bound := exchange.bound(size)) is not None:
            assert all(torch.equal(mean, means[0]) for mean in means)
            assert float((means[0].double() - exact).norm()) <= 2 * bound * math.sqrt(exact.numel())


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

    def run(rank: Rank, dtype: torch.dtype) -> bool:
        hook = rank.hook(exchange)
        hook.mean(_bucket(_input(rank.rank, 0, 2000).to(dtype))).wait()
        before = _residual(hook)
        bad = _input(rank.rank, 1, 2000).to(dtype)
        bad[7] = math.inf if rank.rank == 0 else bad[7]
        hook.mean(_bucket(bad)).wait()
        owes = bool(before.any()) or dtype == torch.bfloat16  # which fp16 carries as it is
        return owes and torch.equal(before, _residual(hook))

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert all(thread_ranks(size, lambda rank, dtype=dtype: run(rank, dtype))), dtype  # type: ignore[misc]


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


def _mean(rank: Rank, exchange: Exchange, values: Tensor) -> Tensor:
    hook, bucket = rank.hook(exchange, chunk_bytes=16_384), _bucket(values)
    hook.mean(bucket).wait()
    return bucket.flat


def _bucket(values: Tensor, index: int = 0) -> Bucket:
    """A square matrix, and one row with what is left: vectors may be exempt from coding."""
    side = math.isqrt(values.numel())
    square, row = values.split([side * side, values.numel() - side * side])
    return make_bucket([square.view(side, side), row.view(1, -1)], [f"{index}.square", f"{index}.row"], index)


def _residual(hook: Hook) -> Tensor:
    """What is kept for a bucket, in its order."""
    kept = hook.state_dict()["residuals"]
    return torch.cat([kept["0.square"], kept["0.row"]])


def _sized(index: int, seed: int) -> Tensor:
    return gaussian(100 + 137 * index, seed=seed)


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
    check_mean,
    check_non_finite_reaches_all,
    check_many_in_flight,
    check_conservation,
    check_residual_survives_inf,
    check_traffic,
)
