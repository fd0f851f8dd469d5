"""What is special to one exchange: options, allocation, sums. The contracts are in tests/exchanges."""

import pytest
import torch

from gradwire.codecs import Int8
from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges import Coded, Exact, exchange
from gradwire.exchanges.allocate import widths_of
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import thread_ranks
from gradwire.testing.contracts import gaussian

from .test_contracts import SPECS


@pytest.mark.parametrize("spec", SPECS)
def test_spec_round_trips(spec):
    made = exchange(spec)
    assert exchange(str(made)) == made
    assert str(exchange(str(made))) == str(made)


def _averages(rank, spec, steps, numel=20_000):
    """What `steps` steps on the same gradients give, whose second half is 1000 times smaller."""
    hook, means = rank.hook(exchange(spec)), []
    for _ in range(steps):
        values = gaussian(numel, seed=rank.rank)
        values[numel // 2 :] *= 1e-3
        bucket = make_bucket([values.view(100, -1)])
        hook.begin(bucket)
        hook.mean(bucket).wait()
        means.append(bucket.flat.clone())
    return means, hook.stats().sent_bytes, hook.state_dict()


@pytest.mark.parametrize("size", [2, 3])
def test_allocation_pays_from_the_second_step_on(size):
    """Bits go where the energy is: less error for the same bytes, the same bits on all ranks."""
    inputs = [gaussian(20_000, seed=rank) for rank in range(size)]
    exact = torch.stack(inputs).mean(0)
    exact[10_000:] *= 1e-3
    outcomes = thread_ranks(size, lambda rank: _averages(rank, "int4:allocate=true,fairness=1.0", 3))
    means, sent, _ = outcomes[0]
    errors = [float((mean - exact).norm()) for mean in means]
    assert errors[1] < errors[0] / 2
    assert all(torch.equal(mean, means[2]) for (*_, mean), _, _ in outcomes)
    plain = thread_ranks(size, lambda rank: _averages(rank, "int4", 1))[0][1]
    assert sent <= 1.05 * plain


def test_allocation_resumes_to_the_bit():
    def resumed(rank):
        state = _averages(rank, "int4:allocate=true", 2)[2]
        hook = rank.hook(exchange("int4:allocate=true"))
        hook.load_state_dict(state)
        values = gaussian(20_000, seed=rank.rank)
        values[10_000:] *= 1e-3
        bucket = make_bucket([values.view(100, -1)])
        hook.mean(bucket).wait()
        return bucket.flat

    whole = thread_ranks(2, lambda rank: _averages(rank, "int4:allocate=true", 3)[0][2])
    assert torch.equal(thread_ranks(2, resumed)[0], whole[0])


@pytest.mark.parametrize("fairness", [0.0, 0.5, 1.0])
def test_widths_spend_the_budget(fairness):
    energy = gaussian(1000).square() * 10.0 ** gaussian(1000, seed=1)
    widths = widths_of(energy, 4, fairness)
    assert 3.9 * 1000 <= int(widths.sum()) <= 4000
    assert set(widths.tolist()) <= {1, 2, 3, 4, 5, 6, 8}
    order = energy.argsort()
    assert fairness == 0 or (widths[order].diff() >= 0).all()
    assert fairness != 0 or (widths == 4).all()


def test_options_override_the_spec():
    assert exchange("fp16", accumulate="wire") == exchange("fp16:accumulate=wire")
    assert exchange("fp16:feedback=true", feedback=False) == exchange("fp16")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("fp61", "Did you mean 'fp16'"),
        (
            "nothing",
            "Available: bf16, exact, fp16, fp8, int2, int3, int4, int5, int6, int8, noop, powersgd, sign, topk",
        ),
        ("auto", "auto chooses a hook for a model"),
        ("fp16:acumulate=wire", "Did you mean 'accumulate'"),
        ("fp16:accumulate=int8", "accumulate must be one of fp32, wire, got 'int8'"),
        ("fp16:feedback=maybe", "feedback must be true or false, got 'maybe'"),
        ("fp16:feedback", "not of the form option=value"),
        ("fp16:shots=one,shots=two", "given twice"),
        ("fp16:accumulate=wire,feedback=true", "takes neither feedback nor shots"),
        ("int8:block=100", "block must be a power of two from 8 to 4096, got 100"),
        ("int8:block=0", "block must be a power of two"),
        ("int4:block=-64", "block must be a power of two"),
        ("topk:ratio=0", r"ratio must be in \(0, 1\], got 0"),
        ("topk:ratio=2", r"ratio must be in \(0, 1\], got 2"),
        ("int6:codebook=lloyd", "codebook must be one of trained, uniform"),
        ("int4:hadamard=100", "hadamard must be one of 0, 64, 128, 256"),
        ("int4:block=8,hadamard=256", "needs blocks of 16 values or more"),
        ("int4:exempt=(", "is never closed"),
        ("int8:allocate=true", "allocate=true is for int2 to int6"),
        ("int4:allocate=true,feedback=true", "without feedback"),
        ("int4:allocate=true,fairness=2", "fairness must be from 0 to 1"),
        ("int8:accumulate=wire", "accumulate=wire is for wires the backend can sum"),
        ("exact:block=4", "unknown option 'block'"),
        ("", "has no name"),
        (":a=1", "has no name"),
    ],
)
def test_bad_spec(spec, text):
    with pytest.raises(SpecError, match=text):
        exchange(spec)


@pytest.mark.parametrize("wrong", [None, 8, b"fp16", object(), ["fp16"]])
def test_not_a_spec(wrong):
    with pytest.raises(SpecError, match="spec such as 'fp16' or an exchange object"):
        exchange(wrong)


def test_options_do_not_go_with_an_object():
    with pytest.raises(SpecError, match="go with a spec"):
        exchange(Exact(), feedback=True)


def test_a_wire_the_backend_cannot_sum_is_refused_when_written():
    with pytest.raises(SpecError, match="accumulate=fp32"):
        Coded(Int8(), accumulate="wire")


@pytest.mark.parametrize("spec", ["fp16", "fp16:accumulate=wire", "fp16:shots=two"])
@pytest.mark.parametrize("size", [2, 4])
def test_fp16_does_not_overflow_where_the_mean_fits(spec, size):
    """60000 on every rank: the sum is beyond float16, the mean is not."""
    means = thread_ranks(size, lambda rank: rank.mean(spec, [torch.full((100,), 60000.0)]).flat)
    torch.testing.assert_close(means[0], torch.full((100,), 60000.0), rtol=1e-3, atol=0)


def test_fp16_carries_what_float16_cannot():
    """1e5 overflows a float16 and 2e-8 vanishes in one; with a scale both arrive."""
    for value in (1e5, 2e-8):
        means = thread_ranks(3, lambda rank, value=value: rank.mean("fp16", [torch.full((50,), value)]).flat)
        torch.testing.assert_close(means[0], torch.full((50,), value), rtol=1e-3, atol=0)


def test_float32_sums_do_not_lose_accuracy_with_ranks():
    """The error of `accumulate=fp32` stays where it is; half-precision sums get worse with every rank."""

    def error(spec, size):
        inputs = [gaussian(20_000, seed=rank) for rank in range(size)]
        mean = thread_ranks(size, lambda rank: rank.mean(spec, [inputs[rank.rank]]).flat)[0]
        exact = torch.stack(inputs).double().mean(0)
        return float((mean.double() - exact).norm() / exact.norm())

    assert error("bf16", 8) < 1.5 * error("bf16", 4)
    assert error("bf16", 8) < error("bf16:accumulate=wire", 8)


@pytest.mark.parametrize("shots", ["one", "two"])
def test_16_bit_gradients_are_added_up_in_float32(shots):
    inputs = [gaussian(4096, seed=rank).bfloat16().view(64, 64) for rank in range(6)]
    exact = torch.stack(inputs).double().mean(0).view(-1)
    mean = thread_ranks(6, lambda rank: rank.mean(f"bf16:shots={shots}", [inputs[rank.rank]]).flat)[0].double()
    assert float((mean - exact).norm()) <= 1.1 * float((exact.bfloat16() - exact).norm())


def test_a_huge_step_does_not_end_allocation():
    def run(rank):
        hook = rank.hook("int4:allocate=true")
        for scale in (1e20, 1.0, 1.0):
            hook.mean(make_bucket([gaussian(4096, seed=rank.rank, scale=scale).view(64, 64)])).wait()
        return [energy for kept in hook.state_dict()["memory"].values() for energy in kept.values()]

    assert all(torch.isfinite(energy).all() for energy in thread_ranks(2, run)[0])


def test_long_specs_that_differ_at_their_end_are_told_apart():
    names = "|".join(f"layer{index}" for index in range(60))

    def run(rank):
        with pytest.raises(RegisterError, match="all ranks must ask for the same hook"):
            rank.hook(f"int8:exempt={names}{rank.rank}")

    thread_ranks(2, run)
