"""The drop-in quantization hooks, and each bug of torch's, by its number in the inventory, as a test."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.ddp_comm_hooks import DDPCommHookType, default_hooks, register_ddp_comm_hook
from gradwire.ddp_comm_hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from gradwire.errors import SpecError

from ..kit.ranks import on_ranks
from ..kit.trial import same_everywhere

BOTH = (quantization_pertensor_hook, quantization_perchannel_hook)


def rows_of(bucket_size):
    """The hook with another bucket size, as callers of torch's write it."""

    def hook(state, bucket):
        return quantization_perchannel_hook(state, bucket, bucket_size)

    return hook


def averaged(hook, gradient, dtype=torch.float32):
    """What a model's only gradient becomes, with `gradient` on this rank."""
    model = DDP(nn.Linear(gradient.numel(), 1, bias=False).to(dtype))
    model.register_comm_hook(None, hook)
    model(gradient.to(dtype).view(1, -1)).sum().backward()
    return model.module.weight.grad.view(-1)


@on_ranks(2, thorough=(3,))
def test_bucket_sizes(ranks):
    """Any bucket size averages, to half a step of each row on 2 ranks, and of the largest row twice on more."""
    values = torch.randn(ranks.size, 1000, generator=torch.Generator().manual_seed(0)) * (1 + torch.arange(1000) // 100)
    for bucket_size in (1, 7, 100, 128, 512, 1000, 4096, 100_000):
        error = (averaged(rows_of(bucket_size), values[ranks.rank]) - values.mean(0)).abs()
        width = bucket_size if ranks.size == 2 else 1000  # with more ranks, rows begin anew where a rank's part does
        for own, part in zip(error.split(width), values.split(width, 1), strict=True):
            assert own.max() <= part.abs().max() / 254 * (1.01 if ranks.size == 2 else 2.02), bucket_size
    wrong = DDP(nn.Linear(4, 1))
    wrong.register_comm_hook(None, rows_of(0))
    with pytest.raises(SpecError, match="bucket_size"):
        wrong(torch.ones(1, 4)).sum().backward()


@on_ranks(2, thorough=(3,))
def test_many_buckets(ranks):
    """Many buckets in flight neither hang nor abort, and every step is right (torch's 3.2 and 3.3)."""
    for hook in (*BOTH, rows_of(100)):
        torch.manual_seed(0)
        model = DDP(nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)]), bucket_cap_mb=0.001)
        model.register_comm_hook(None, hook)
        for step in range(6):
            model.zero_grad()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * ranks.rank + step))
            model(x).square().sum().backward()
            grads = [param.grad for param in model.parameters()]
            same_everywhere(grads, dist.group.WORLD)
            assert all(grad.isfinite().all() for grad in grads)


@on_ranks(2, thorough=(3,))
def test_bucket_holds_the_mean_after_the_hook(ranks):
    """What runs after the hook reads the mean from the bucket, not the local gradient (torch's 3.17)."""
    for hook in BOTH:
        model, seen = DDP(nn.Linear(2, 1, bias=False)), []

        class Recording:
            def step_param(self, param, grad, seen=seen):
                seen.append(grad.clone())

        state = _OptimizerHookState(Recording())
        model.register_comm_hook(None, _hook_then_optimizer(hook, state))
        model(torch.full((1, 2), float(ranks.rank))).sum().backward()
        for got in (seen[0], model.module.weight.grad):
            torch.testing.assert_close(got, torch.full((1, 2), (ranks.size - 1) / 2))


@on_ranks(2, thorough=(3,))
def test_small_values_are_not_zero(ranks):
    """Gradients of 2e-8, and of 1e-30, are not zero (torch's 3.27)."""
    for hook in BOTH:
        for value in (2e-8, 1e-30, 1e5):
            got = averaged(hook, torch.full((700,), value * (ranks.rank + 1)))
            torch.testing.assert_close(got, torch.full((700,), value * (ranks.size + 1) / 2), rtol=1e-2, atol=0)


@on_ranks(2, thorough=(3,))
def test_outliers_cost_their_row_only(ranks):
    """An outlier costs its own row only; with one scale it costs all, by no more than half a step (torch's 3.27)."""
    values = torch.tensor([1e-3, 1.0]).repeat_interleave(512)
    values[0] = 1e3
    rows = averaged(quantization_perchannel_hook, values)
    torch.testing.assert_close(rows[512:], values[512:], rtol=1e-5, atol=0)
    for hook in BOTH:
        torch.testing.assert_close(averaged(hook, values), values, rtol=0, atol=2 * 1e3 / 254)
    far = torch.linspace(100, 101, 512)
    for hook in BOTH:
        torch.testing.assert_close(averaged(hook, far), far, rtol=0, atol=2 * 101 / 254)


@on_ranks(2, thorough=(3,))
def test_non_finite_values_reach_all_ranks(ranks):
    """An inf or NaN of one rank reaches all; with rows, only its row (torch's 3.27)."""
    for bad in (torch.inf, -torch.inf, torch.nan):
        values = torch.ones(2048)
        if ranks.rank == ranks.size - 1:
            values[600] = bad
        for hook in BOTH:
            assert not averaged(hook, values)[600].isfinite()
        rows = averaged(quantization_perchannel_hook, values).isfinite().view(4, 512).all(1)
        assert rows.tolist() == [True, False, True, True]


@on_ranks(2, thorough=(3,))
def test_results_keep_their_type_and_memory(ranks):
    """The result is in the bucket's own type and memory: float64 is not cut to float32 (torch's 3.27)."""
    for hook in BOTH:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            seen = []

            def spying(state, bucket, hook=hook, seen=seen):
                def look(done):
                    seen.append((done.value().dtype, done.value().data_ptr() == bucket.buffer().data_ptr()))
                    return done.value()

                return hook(state, bucket).then(look)

            got = averaged(spying, torch.full((9,), 1 / 3), dtype)
            assert seen == [(dtype, True)]
            torch.testing.assert_close(got, torch.full((9,), 1 / 3, dtype=dtype), rtol=1e-2, atol=0)


@on_ranks(2, thorough=(3,))
def test_registration_by_type(ranks):
    """Registered by type, the hook is known and its promises are checked."""
    for kind, spec in (("PER_TENSOR", "whole_int8"), ("PER_CHANNEL", "int8:block=512")):
        model = DDP(nn.Linear(64, 64))
        hook = register_ddp_comm_hook(DDPCommHookType[f"QUANTIZE_{kind}"], model)
        model(torch.randn(2, 64)).sum().backward()
        assert str(hook.exchange) == spec
        assert hook.verify().identical


@on_ranks(2, thorough=(3,))
def test_wrappers_return_the_own_type(ranks):
    """Inside a 16-bit wrapper the gradient still comes back in its own type."""
    for wrap in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
        for hook in BOTH:
            got = averaged(wrap(hook), torch.full((9,), float(ranks.rank)))
            torch.testing.assert_close(got, torch.full((9,), (ranks.size - 1) / 2), rtol=1e-2, atol=0)


@on_ranks(2, thorough=(3,))
def test_sent_bytes(ranks):
    """About a byte a value on 2 ranks, under two on more: what a rank sends does not grow with the ranks."""
    for kind in ("PER_TENSOR", "PER_CHANNEL"):
        model = DDP(nn.Linear(512, 512, bias=False))
        hook = register_ddp_comm_hook(DDPCommHookType[f"QUANTIZE_{kind}"], model)
        model(torch.randn(2, 512)).sum().backward()
        assert hook.stats().sent_bytes <= 2 * (ranks.size - 1) / ranks.size * 512 * 512 * 1.01


@pytest.mark.parametrize("wrong", [0, -512, 512.0, "512", None, True])
def test_wrong_bucket_size_is_refused(wrong):
    """Said before anything else happens."""
    with pytest.raises(SpecError, match=r"bucket_size, .* must be a whole number of at least 1, got"):
        quantization_perchannel_hook(None, None, wrong)
