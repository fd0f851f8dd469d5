"""Hook.verify(): accepts every registered exchange, rejects every mutant, and says only what it has checked."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine import verify as verifying
from gradwire.errors import VerifyError
from gradwire.exchanges import Exact, exchange
from gradwire.exchanges.bucket import make_bucket, segments_of
from gradwire.testing import spawn_ranks, thread_ranks
from gradwire.testing.contracts import gaussian
from gradwire.testing.contracts.exchanges import input_of

from ..exchanges.test_contracts import AVERAGING, KINDS, LOSSY, Halves, Referenced, cases, first
from ..kit.mutants import mutants

pytestmark = pytest.mark.usefixtures("one_thread")


def one_step(hook, rank, step=0):
    bucket = input_of(rank.rank, step)
    hook.begin(bucket)
    hook.mean(bucket).wait()


def message_of(hook):
    """What verify() objects to; empty if it accepts the hook."""
    try:
        hook.verify()
    except VerifyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("spec", "size"), [*cases((2,), (2, 3, 4), AVERAGING, KINDS), *first(2, LOSSY)])
def test_an_exchange_is_accepted_and_its_mutants_are_not(spec, size):
    made = exchange(spec)
    assert thread_ranks(size, lambda rank: survivors(rank, made), 100.0) == [[]] * size


def survivors(rank, made):
    """The mutants that verify() accepts, and the exchange itself if it does not."""
    hook = rank.hook(next(iter(mutants(made).values())))  # which has a lane more
    hook.use(made, agreed=True)
    one_step(hook, rank)
    result = hook.verify()
    exact = "accumulate=wire" not in str(made)  # which rounds once in the reference, and as often as the backend adds
    near = pytest.approx(result.reference, rel=1e-3 if exact else 0.5, abs=1e-7)
    wrong = [] if result.error == near and result.error <= result.bound else [str(result)]
    for name, mutant in mutants(made).items():
        hook.use(mutant, agreed=True)
        wrong += [] if message_of(hook) else [name]
    return wrong


def test_the_text_names_error_reference_and_bound():
    def run(rank):
        hook = rank.hook("int8")
        one_step(hook, rank)
        return str(hook.verify())

    texts = thread_ranks(2, run)
    assert texts[0] == texts[1]
    assert texts[0].startswith("int8: 1 steps on every rank, replicas bit-identical, error 0.00")
    assert "(reference 0.00" in texts[0]
    assert texts[0].endswith(", bound 0.064)")


@pytest.mark.parametrize("spec", ["int4:exempt=none,feedback=true", "powersgd", "int4:allocate=true"])
def test_the_state_of_the_training_is_untouched(spec):
    def run(rank):
        hooks = rank.hook(spec), rank.hook(spec)
        for step in range(3):
            for hook in hooks:
                one_step(hook, rank, step)
            sent = hooks[0].stats().sent_bytes
            hooks[0].verify()
            assert hooks[0].stats().sent_bytes == sent
        first, second = (hook.state_dict() for hook in hooks)
        assert first["step"] == second["step"] == 3
        for name, value in first["residuals"].items():
            assert torch.equal(value, second["residuals"][name])
        for name, kept in first["memory"].items():
            assert all(torch.equal(value, second["memory"][name][key]) for key, value in kept.items())

    thread_ranks(2, run)


def test_a_loaded_checkpoint_does_not_count_as_having_run():
    def run(rank):
        trained = rank.hook("bf16:feedback=true")
        one_step(trained, rank)
        hook = rank.hook("bf16:feedback=true")
        assert "has not run on rank 0, 1. Call verify() after a backward pass" in message_of(hook)
        hook.load_state_dict(trained.state_dict())
        assert hook.steps == 1
        assert "has not run on rank 0, 1 since its checkpoint was loaded" in message_of(hook)
        one_step(hook, rank, 1)
        assert hook.verify().steps == 2
        hook.load_state_dict(trained.state_dict())
        assert "since its checkpoint was loaded" in message_of(hook)

    thread_ranks(2, run)


def test_ranks_that_have_not_run_are_named_on_all_ranks():
    def run(rank):
        hook = rank.hook("exact")
        if rank.rank != 1:
            hook.begin(input_of(rank.rank, 0))
        return message_of(hook)

    assert all("has not run on rank 1. " in text for text in thread_ranks(3, run))


def test_noop_is_not_compared():
    def run(rank):
        hook = rank.hook("noop")
        one_step(hook, rank)
        return str(hook.verify())

    assert thread_ranks(2, run)[0] == "noop: 1 steps on every rank, replicas bit-identical, no averaging"


def test_an_exchange_without_a_reference_is_simulated_and_one_with_rejects_mutants():
    def run(rank):
        hook = rank.hook(Halves())
        one_step(hook, rank)
        result = hook.verify()
        assert result.error <= result.bound
        return survivors(rank, Referenced())

    assert thread_ranks(2, run) == [[], []]


def test_large_buckets_are_sampled_by_whole_tensors(monkeypatch):
    sizes = (30, 100, 40, 50)
    segments = segments_of([torch.empty(n) for n in sizes], [str(n) for n in sizes])
    assert [s.numel for s in verifying.chosen(segments, 1000)] == [30, 100, 40, 50]
    assert [s.numel for s in verifying.chosen(segments, 90)] == [30, 40]
    assert [s.numel for s in verifying.chosen(segments, 20)] == [20]
    monkeypatch.setattr(verifying, "MOST_VALUES", 1000)

    def run(rank):
        hook = rank.hook("int4:exempt=none,feedback=true")
        bucket = make_bucket([gaussian(900).view(30, 30), gaussian(100)])
        bucket.params[0].grad = torch.ones(30, 30)
        hook.begin(bucket)
        hook.mean(bucket).wait()
        return hook.verify().error

    assert 0 < thread_ranks(2, run)[0] < 1


def test_empty_buckets_are_passed_over():
    def run(rank):
        hook = rank.hook("int8")
        for index, numel in enumerate((0, 500)):
            bucket = make_bucket([gaussian(numel)], index=index)
            hook.begin(bucket)
            hook.mean(bucket).wait()
        return hook.verify().error

    assert 0 < thread_ranks(2, run)[0] < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("spec", ["exact", "int8", "bf16:accumulate=wire", "topk", "powersgd:rank=1", "fp16:shots=two"])
def test_every_gradient_type_is_accepted(spec, dtype):
    def run(rank):
        hook = rank.hook(spec)
        bucket = make_bucket([gaussian(4096, seed=rank.rank).view(64, 64).to(dtype), gaussian(9).to(dtype)])
        hook.begin(bucket)
        hook.mean(bucket).wait()
        return message_of(hook)

    assert thread_ranks(3, run) == ["", "", ""]


# -- with DDP ----------------------------------------------------------------------------------------------------------


def frozen_after_registration(rank, size):
    """A parameter frozen after registration and changed on one rank; afterwards one frozen from the beginning."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    module[2].weight.requires_grad_(False)
    model = DistributedDataParallel(module)
    hook = gradwire.register(model, "int8")
    model(torch.randn(4, 40)).square().sum().backward()
    texts = [str(hook.verify())]
    module[1].bias.requires_grad_(False)
    for changed in (module[1].bias, module[2].weight):
        if rank == 1:
            changed.data.view(-1)[3] += 1e-3
        texts.append(message_of(hook))
        if rank == 1:
            changed.data.view(-1)[3] -= 1e-3
    hook.close()
    return texts


def test_a_frozen_parameter_that_differs_is_named():
    for accepted, after, before in spawn_ranks(2, frozen_after_registration):
        assert "replicas bit-identical" in accepted
        assert "in 1 parameters, first '1.bias'" in after
        assert "'2.weight'" in before


def test_verify_needs_only_what_it_declares():
    """`Verifiable` is the whole interface between verify.py and a Hook."""

    class Alone:
        exchange, rank, size, device, layouts, steps, fired = Exact(), 0, 1, torch.device("cpu"), {}, 3, 1

        def gather(self, values):
            return values[None]

    assert verifying.verify(Alone(), []).steps == 3
