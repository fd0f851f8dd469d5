"""Whitening: results are those of the reference, and the second moment of every kind of optimizer is read rightly."""

import logging
from collections import defaultdict

import pytest
import torch
from torch import nn

import gradwire
from gradwire.errors import ExchangeError, RegisterError, SpecError, VerifyError
from gradwire.exchanges import exchange
from gradwire.exchanges.bucket import Bucket, make_bucket, segments_of
from gradwire.exchanges.whiten import FLOOR, WARMUP, SecondMoments, floor_of
from gradwire.testing import thread_ranks
from gradwire.testing.contracts.exchanges import input_of

from ..kit.mutants import Mutant, mutants

pytestmark = pytest.mark.usefixtures("one_thread")


def stepped(optimizer_type, tensors, steps=2, **options):
    """An optimizer that has made some steps on parameters like these, and the parameters."""
    params = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    optimizer = optimizer_type(params, **options)
    for _ in range(steps):
        for param, tensor in zip(params, tensors, strict=True):
            param.grad = tensor.clone()
        optimizer.step()
    return optimizer, params


def moments_for(buckets):
    """Second moments that differ by a factor of a million within every tensor, by name."""
    tensors = {name: grad for bucket in buckets for name, grad in zip(bucket.names, bucket.grads, strict=True)}
    scaled = [torch.logspace(-3, 3, grad.numel()).view(grad.shape) for grad in tensors.values()]
    optimizer, params = stepped(torch.optim.AdamW, scaled, betas=(0.9, 0.0))
    return SecondMoments(optimizer, dict(zip(tensors, params, strict=True)))


def unmultiplied(mutant, bucket, comm, residual):
    """Leave the first tensor in units of updates."""
    moment = bucket.moment_of(bucket.segments[0])
    bucket.flat[: moment.values.numel()] /= (moment.values + moment.floor).sqrt()


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("int2:whiten=true", 3),
        ("sign:whiten=true,exempt=none", 3),
        ("int3:whiten=true,shots=one", 2),
        ("int2:whiten=true,feedback=true,exempt=none", 3),
        ("two_level(inside=exact, across=int2(whiten=true), node=2)", 4),
    ],
)
def test_results_are_those_of_the_reference_and_mutants_are_rejected(spec, size):
    made = exchange(spec)
    wrong = {**mutants(made), "units": Mutant(made, "units", after=unmultiplied)}

    def survivors(rank):
        hook = rank.hook(Mutant(exchange(spec.replace("whiten=true", "whiten=false")), "none"), chunk_bytes=4096)
        hook.moments = moments_for([input_of(0, 0)])
        hook.use(made, agreed=True)
        for _ in range(WARMUP + 1):
            bucket = input_of(rank.rank, 0)
            hook.begin(bucket)
            hook.mean(bucket).wait()
        assert hook.verify().reference is not None
        accepted = []
        for name, mutant in wrong.items():
            hook.use(mutant, agreed=True)
            try:
                hook.verify()
                accepted.append(name)
            except VerifyError:
                pass
        return accepted

    assert thread_ranks(size, survivors, 100.0) == [[]] * size


def test_the_error_is_even_in_units_of_updates_and_no_byte_more_travels():
    """A matrix whose rows differ in scale by a factor of 20, blocks across them."""
    scale = torch.logspace(-1.3, 0, 64)
    grads = [torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)) * scale for rank in range(2)]
    mean = (grads[0] + grads[1]) / 2

    def run(rank, spec):
        hook = rank.hook("int2")
        optimizer, params = stepped(torch.optim.Adam, [scale.expand(64, 64)])
        hook.moments = SecondMoments(optimizer, {"0": params[0]})
        hook.use(exchange(spec), agreed=True)
        hook.steps = WARMUP + 1
        bucket = make_bucket([grads[rank.rank].clone()])
        hook.begin(bucket)
        hook.mean(bucket).wait()
        off = ((bucket.grads[0] - mean) / scale).square().mean().sqrt() / (mean / scale).square().mean().sqrt()
        return float(off), hook.stats().sent_bytes

    (plain, sent), (white, sent_white) = (
        thread_ranks(2, lambda rank, spec=spec: run(rank, spec))[0] for spec in ("int2", "int2:whiten=true")
    )
    assert white < 0.5 < plain
    assert sent == sent_white


def test_the_first_steps_are_exact_and_values_without_state_travel_as_without_whitening():
    def run(rank):
        hook = rank.hook("int2")
        optimizer, params = stepped(torch.optim.AdamW, [torch.ones(40, 64)], steps=0)
        hook.moments = SecondMoments(optimizer, {"1.0": params[0]})
        plain, results = rank.hook("int2"), {}
        hook.use(exchange("int2:whiten=true"), agreed=True)
        for step in (0, WARMUP - 1, WARMUP):
            hook.steps = step + 1
            bucket, other = input_of(rank.rank, 0), input_of(rank.rank, 0)
            hook.mean(bucket).wait()
            plain.mean(other).wait()
            results[step] = bucket.flat, other.flat
        return results

    results = thread_ranks(2, run)[0]
    exact = (input_of(0, 0).flat + input_of(1, 0).flat) / 2
    torch.testing.assert_close(results[0][0], exact)
    torch.testing.assert_close(results[WARMUP - 1][0], exact)
    assert torch.equal(*results[WARMUP])


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [
        (torch.optim.Adam, {"betas": (0.9, 0.0)}),
        (torch.optim.AdamW, {"betas": (0.9, 0.0), "amsgrad": True, "fused": True}),
        (torch.optim.NAdam, {"betas": (0.9, 0.0)}),
        (torch.optim.RMSprop, {"alpha": 0.0}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_the_second_moment_is_read_in_the_order_of_the_bucket(optimizer_type, options):
    """With these settings it is the squared gradient itself (Adagrad: its sum over one step)."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(8, 6, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last),
        torch.randn(20, 30, generator=generator).t(),
        torch.randn(5, 7, generator=generator),
    ]
    optimizer, params = stepped(optimizer_type, tensors, steps=1, **options)
    bucket = make_bucket(tensors)
    bucket = Bucket(0, bucket.flat, segments_of(params, bucket.names), is_last=True)
    moment_of = SecondMoments(optimizer, dict(zip(bucket.names, params, strict=True))).for_bucket(WARMUP)
    for chunk in bucket.chunks(100):
        read = torch.cat([moment_of(segment).values for segment in chunk.segments])
        torch.testing.assert_close(read, chunk.flat.square())
    floors = [float(moment_of(segment).floor) for segment in bucket.segments]
    for floor, grad in zip(floors, tensors, strict=True):
        assert FLOOR < floor / float(grad.square().mean()) <= 2 * FLOOR


def test_complex_and_16_bit_parameters():
    values = torch.randn(12, 12, 2, generator=torch.Generator().manual_seed(0))
    for tensor in (torch.view_as_complex(values), values.bfloat16()):
        optimizer, params = stepped(torch.optim.Adam, [tensor], steps=1, betas=(0.9, 0.0))
        (segment,) = segments_of(params, ["p"])
        moment = SecondMoments(optimizer, {"p": params[0]}).for_bucket(0)(segment)
        assert moment.values.dtype == torch.float32
        torch.testing.assert_close(moment.values, values.flatten().square(), rtol=0.02, atol=0)


def test_the_factored_moment_of_adafactor_has_the_shape_of_rows_and_columns():
    rows, columns = torch.logspace(0, 2, 6).view(-1, 1), torch.logspace(0, 1, 9)
    optimizer, params = stepped(torch.optim.Adafactor, [rows * columns, torch.full((4,), 3.0)], steps=1)
    segments = segments_of(params, ["matrix", "vector"])
    moment_of = SecondMoments(optimizer, dict(zip(("matrix", "vector"), params, strict=True))).for_bucket(0)
    matrix = moment_of(segments[0]).values.view(6, 9)
    torch.testing.assert_close(matrix / matrix[0, 0], (rows * columns).square(), rtol=1e-4, atol=0)
    assert moment_of(segments[1]).values.unique().numel() == 1


def test_the_floor_is_a_power_of_two_and_one_for_zeros():
    assert float(floor_of(torch.zeros(5))) == 1.0
    assert float(floor_of(torch.full((5,), 1e-40))) == 2.0**-80
    assert float(floor_of(torch.full((1000,), 0.75 / FLOOR))) == 1.0
    wide = torch.rand(400, 1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 0, 1000)
    assert FLOOR < float(floor_of(wide.flatten())) / float(wide.mean()) < 2.2 * FLOOR


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD([p], lr=0.1), "SGD keeps none"),
        (lambda p: torch.optim.AdamW([nn.Parameter(torch.ones(2))]), "none of the model's parameters"),
        (lambda p: [p], "must be a torch.optim.Optimizer, got list"),
        (lambda p: type("ZeroRedundancyOptimizer", (torch.optim.AdamW,), {})([p]), "splits it"),
    ],
)
def test_optimizers_that_cannot_help_are_refused(make, words):
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(RegisterError, match=words):
        SecondMoments(make(param), {"p": param})


def test_an_unknown_optimizer_is_noticed_when_its_state_is_there_or_is_still_empty(caplog):
    param = nn.Parameter(torch.ones(2))
    optimizer = type("Own", (torch.optim.AdamW,), {})([param])
    moments, (segment,) = SecondMoments(optimizer, {"p": param}), segments_of([param], ["p"])
    with caplog.at_level(logging.WARNING, "gradwire"):
        for step in (WARMUP - 1, WARMUP, WARMUP):
            assert moments.for_bucket(step)(segment) is None
    assert [record.getMessage().count("no state after 15 steps") for record in caplog.records] == [1]
    optimizer.state = defaultdict(dict, {param: {"momentum": torch.ones(2)}})
    with pytest.raises(ExchangeError, match="it has momentum; known are"):
        moments.for_bucket(WARMUP)(segment)


@pytest.mark.parametrize("spec", ["int4:whiten=true,allocate=true", "bf16:whiten=true"])
def test_options_that_do_not_go_together_are_refused(spec):
    with pytest.raises(SpecError, match="whiten=true is for codecs with blocks"):
        gradwire.exchange(spec)
    assert str(gradwire.exchange("int2:whiten=true")) == "int2:whiten=true"
