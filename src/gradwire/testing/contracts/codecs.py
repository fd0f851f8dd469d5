"""The laws of codecs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradwire._torch import fake_tensors
from gradwire.codecs import Codec
from gradwire.errors import SpecError

SIZES = (0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 4096, 10_007)
SCALES = (1e-30, 1e-8, 1.0, 1e5, 1e30)


def gaussian(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values from a generator of their own."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def heavy_tailed(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Values of which a few are thousands of times larger than most, as in gradients of embeddings."""
    return gaussian(numel, seed, scale) * gaussian(numel, seed + 1_000_000, 2.0).exp()


def layered(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values in 8 runs, each 10 times smaller than the one before, like the layers of a deep model."""
    return gaussian(numel, seed, scale) * 10.0 ** -(torch.arange(numel) * 8 // max(numel, 1)).float()


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
    assert torch.equal(codec.decode(codec.encode(torch.zeros(300)), 300), torch.zeros(300))
    spike = torch.zeros(300)
    spike[123] = -3.0
    for values in (torch.full((300,), 0.1), torch.full((300,), -7e4), spike, torch.full((5,), 3e38), torch.ones(1)):
        _check_bound(codec, values)
    denormal = codec.decode(codec.encode(torch.full((300,), 1e-42)), 300)
    assert (denormal - 1e-42).abs().max() <= 1e-36


def check_non_finite(codec: Codec) -> None:
    """An inf or NaN among normal values comes out as inf or NaN."""
    for bad in (math.inf, -math.inf, math.nan):
        for where in (0, 150, 299):
            values = gaussian(300)
            values[where] = bad
            assert not torch.isfinite(codec.decode(codec.encode(values), 300)).all(), (bad, where)


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
    assert torch.equal(codec.decode(torch.stack([wire, wire], dim=1)[:, 0], 1000), once)
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
    with fake_tensors(), _FakeCopies():
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
        assert torch.equal(codec.sum_(torch.empty(numel), wires, 0.25), total), numel
        wire = torch.empty_like(rows[0])
        codec.reduce_(wire, own, wires, 1, 0.25)
        assert torch.equal(codec.decode(wire, numel), codec.decode(codec.encode(mean), numel)), numel


class _FakeCopies(TorchFunctionMode):
    """`copy_` and indices of fake cuda tensors, which Python's bindings refuse on a build without cuda."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            return _item(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        return func(*args, **(kwargs or {}))


def _item(tensor: Tensor, index: tuple[int | slice, ...]) -> Tensor:
    dim = 0
    for part in index:
        if isinstance(part, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
            dim += 1
        else:
            tensor = torch.ops.aten.select.int(tensor, dim, part)
    return tensor


def _check_bound(codec: Codec, values: Tensor) -> None:
    error = codec.decode(codec.encode(values), values.numel()).double() - values.double()
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


def check_codec(codec: Codec) -> None:
    """Run every contract on one codec.

    Args:
        codec: The codec, for instance `gradwire.codecs.CODECS["int8"]()`.

    Raises:
        AssertionError: The first contract that does not hold.
        SpecError: If it is not a codec.

    Examples:
        >>> from gradwire.testing import check_codec
        >>> check_codec(gradwire.codecs.Int4(block=32))
    """
    if not isinstance(codec, Codec):
        raise SpecError(f"check_codec takes a gradwire.Codec such as gradwire.codecs.Int8(), got {codec!r}")
    for check in CODEC_CHECKS:
        check(codec)
