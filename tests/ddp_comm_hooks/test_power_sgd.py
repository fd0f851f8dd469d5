"""The drop-in PowerSGD hooks, and each bug of torch's, by its number in the inventory, as a test."""

import io
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.ddp_comm_hooks import DDPCommHookType, powerSGD, register_ddp_comm_hook
from gradwire.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from gradwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.errors import SpecError

from ..kit.ranks import on_ranks
from ..kit.trial import same_everywhere, through_a_file
from ..kit.versions import complex_gradients, ddp_option


def layers(count=3, width=16):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def hooked(module, hook=powerSGD_hook, start=2, rank=1, group=None, state=None, **options):
    """A model with a hook, and the hook's state."""
    state = state or PowerSGDState(group, rank, start, min_compression_rate=0.5)
    model = DDP(module, process_group=group, **options)
    model.register_comm_hook(state, hook)
    return model, state


def train(model, steps, first=0, lr=0.05):
    """Plain SGD; the loss of each step."""
    losses = []
    for step in range(first, first + steps):
        model.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= lr * param.grad
    return losses


def check_replicas(model, group=None):
    """All ranks hold the same finite parameters."""
    assert all(param.isfinite().all() for param in model.parameters())
    same_everywhere(model.parameters(), group or dist.group.WORLD)


@on_ranks(2, thorough=(4,))
def test_both_forms_train(ranks):
    """Neither hangs, asserts nor diverges, and they come near plain training (torch's 3.1 and 3.3)."""
    plain = train(DDP(layers()), 60)
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        model, state = hooked(layers(), hook)
        losses = train(model, 60)
        check_replicas(model)
        assert state.iter == 60
        assert losses[0] == plain[0]
        assert sum(losses[-5:]) <= sum(plain[:5]) * 0.9


@on_ranks(2, thorough=(4,))
def test_many_tiny_buckets(ranks):
    """Dozens of buckets in flight (torch's 3.3)."""
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        model, _ = hooked(layers(24), hook, bucket_cap_mb=0.0005)
        train(model, 6)
        check_replicas(model)


class Partly(nn.Module):
    """Uses its second layer if `both` is set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.both = False

    def forward(self, x):
        return self.second(self.first(x)) if self.both else self.first(x)


@on_ranks(2, thorough=(4,))
def test_unused_parameters(ranks):
    """Zero gradients, and gradients that come later, stay finite (torch's 3.4 and 3.5)."""
    model, _ = hooked(Partly(), find_unused_parameters=True, bucket_cap_mb=0.0005)
    train(model, 5)
    model.module.both = True
    before = model.module.second.weight.detach().clone()
    train(model, 5)
    assert not torch.equal(before, model.module.second.weight)
    check_replicas(model)


class Odd(nn.Module):
    """A scalar, an empty tensor, a transposed and a complex matrix (torch's 3.15, 3.18, 3.19)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.ones(0, 4))
        self.weight = nn.Parameter(torch.randn(16, 16).t())
        self.phase = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))

    def forward(self, x):
        return self.scale * (x @ self.weight + (x.to(torch.complex64) @ self.phase).real) + self.none.sum()


@complex_gradients
@on_ranks(2, thorough=(4,))
def test_odd_parameters(ranks):
    """Every value of every parameter is averaged: at rank 16 to the mean."""
    model, _ = hooked(Odd(), rank=16, state=PowerSGDState(None, 16, 2, min_compression_rate=0.01))
    train(model, 3)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(ranks.rank))
    model.zero_grad()
    model.module(x).square().mean().backward()
    local = [param.grad.clone() for param in model.parameters()]
    for grad in local:
        dist.all_reduce(torch.view_as_real(grad) if grad.is_complex() else grad)
    model.zero_grad()
    pending = model._comm_hooks[0][1].error_dict
    assert all(value.abs().max() <= 1e-4 for value in pending.values() if value.numel())
    model(x).square().mean().backward()
    for param, total in zip(model.parameters(), local, strict=True):
        torch.testing.assert_close(param.grad, total / ranks.size, rtol=1e-3, atol=1e-4)


@on_ranks(2, thorough=(4,))
def test_wrappers_do_not_overflow(ranks):
    """Under the 16-bit wrappers nothing overflows, and gradients come back in their own type (torch's 3.9)."""
    for wrapper in (fp16_compress_wrapper, bf16_compress_wrapper):
        model, state = hooked(layers(1), wrapper(powerSGD_hook))
        for _ in range(4):
            model.zero_grad()
            (model(torch.ones(1, 16)).sum() * 40_000).backward()
            torch.testing.assert_close(model.module[0].bias.grad, torch.full((16,), 40_000.0), rtol=1e-2, atol=0)
        assert model.module[0].weight.grad.dtype == torch.float32
        assert state.hook.exchange.wire in ("fp16", "bf16")
        assert all(value.dtype == torch.float32 for value in state.error_dict.values())


@on_ranks(2, thorough=(4,))
def test_one_state_for_two_models(ranks):
    """One state for two models mixes nothing, and each counts its own steps (torch's 3.20)."""
    alone, lone_state = hooked(layers())
    train(alone, 6)
    state = PowerSGDState(None, 1, 2, min_compression_rate=0.5)
    first, _ = hooked(layers(), state=state)
    other, _ = hooked(layers(2), state=state)
    for step in range(6):
        train(first, 1, step)
        train(other, 1, step)
    assert len(state.error_dict) == 2 * 3 + 2 * 2
    check_replicas(first)
    check_replicas(other)
    assert state.iter == lone_state.iter == 6
    for mine, theirs in zip(first.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@ddp_option("skip_all_reduce_unused_params")
@on_ranks(2, thorough=(4,))
def test_steps_count_without_the_last_bucket(ranks):
    """Steps count although the last bucket never comes (torch's 3.25)."""
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.0005, "skip_all_reduce_unused_params": True}
    model, state = hooked(Partly(), **options)
    train(model, 5)
    assert state.iter == 5
    assert state.compression_stats()[0] > 1


@on_ranks(2, thorough=(4,))
def test_compression_stats(ranks):
    """Values before and after: 2 of 4 steps are compressed."""
    model, state = hooked(layers(1))
    train(model, 4)
    rate, before, after = state.compression_stats()
    assert (before, after) == (2 * (16 * 16 + 16), 2 * (16 + 16 + 16))
    assert rate == before / after
    assert state.q_memory_dict["0"].shape == (1, 16) or state.q_memory_dict["1"].shape == (1, 16)
    assert state.p_memory_dict == {}


@on_ranks(2, thorough=(4,))
def test_resuming_is_exact(ranks):
    """Resuming is exact to the bit (torch's 3.22)."""
    model, state = hooked(layers())
    train(model, 4)
    saved = through_a_file({"model": model.module.state_dict(), "hook": state})
    train(model, 3, 4)
    module = layers()
    module.load_state_dict(saved["model"])
    again, resumed = hooked(module, state=saved["hook"])
    assert resumed.iter == 4
    train(again, 3, 4)
    assert resumed.iter == 7
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        if ranks.size == 2:
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs)  # on more ranks the backend's order of adding depends on the bucket


@on_ranks(2, thorough=(4,))
def test_loaded_state_needs_its_group_again(ranks):
    """A loaded state does not average over the world in place of the group it had (torch's 3.22)."""
    groups = [dist.new_group([member]) for member in range(ranks.size)]
    model, state = hooked(layers(), group=groups[ranks.rank])
    train(model, 3)
    loaded = through_a_file(state)
    again, _ = hooked(layers(), group=groups[ranks.rank], state=loaded)
    with pytest.raises(RuntimeError, match=r"PowerSGDState has lost its groups: set state\.process_group"):
        train(again, 1)
    loaded.process_group = groups[ranks.rank]
    model, _ = hooked(layers(), group=groups[ranks.rank], state=loaded)
    train(model, 1)
    assert loaded.hook.size == 1
    assert loaded.iter == 4
    world, state = hooked(layers(), state=PowerSGDState(dist.group.WORLD, 1, 2))
    train(world, 1)
    assert through_a_file(state).process_group is None


@on_ranks(2, thorough=(4,))
def test_iter_can_be_set(ranks):
    """`iter` can be set, as torch's can; what is read of the memory is a copy, and says so when it is written to."""
    model, state = hooked(layers())
    state.iter = 1
    train(model, 2)
    assert state.iter == 3
    assert state.compression_stats()[0] > 1
    state.iter = 0
    before = state.compression_stats()
    train(model, 2, 2)
    assert state.compression_stats() == before
    with pytest.raises((AttributeError, TypeError)):
        state.error_dict.clear()
    with pytest.raises(ValueError, match="iter must be a whole number"):
        state.iter = -1


@on_ranks(2, thorough=(4,))
def test_state_of_rank_0_on_all_ranks(ranks):
    """Rank 0's file on every rank, as in torch's example, does not multiply its residual (torch's 3.22)."""
    model, state = hooked(layers())
    train(model, 4)
    files = [state.__getstate__()]
    dist.broadcast_object_list(files, 0)
    loaded = PowerSGDState.__new__(PowerSGDState)
    loaded.__setstate__(files[0])
    again, _ = hooked(layers(), state=loaded)
    train(again, 1)
    pending = files[0]["hook"]["residuals"]
    fresh = loaded.hook.state_dict()
    assert fresh["step"] == 5
    assert fresh["residuals"].keys() == pending.keys()


@on_ranks(2, thorough=(4,))
def test_registration_by_type(ranks):
    """All four members register, train and stay in step."""
    for kind in (kind for kind in DDPCommHookType if "POWER_SGD" in kind.name):
        model = DDP(layers())
        hook = register_ddp_comm_hook(kind, model, None)
        assert hook.exchange.warmup == 1000
        assert hook.exchange.rank == (2 if "RANK2" in kind.name else 1)
        assert hook.exchange.batched == ("BATCHED" in kind.name)
        hook.switch(str(hook.exchange).replace("warmup=1000", "warmup=1"))
        train(model, 3)
        check_replicas(model)
        hook.close()
    assert powerSGD.powerSGD_hook is powerSGD_hook


@on_ranks(2, thorough=(4,))
def test_sub_group(ranks):
    """A state on a sub-group averages there, and only there."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks.size, 2)]
    group = pairs[ranks.rank // 2]
    model, _ = hooked(layers(), group=group)
    train(model, 4)
    check_replicas(model, group)


@on_ranks(2, thorough=(4,))
def test_compiled_reducer_is_refused(ranks):
    """DDP's compiled reducer has no place for state."""
    model = DDP(layers())
    model._use_python_reducer = True
    for spec in ("powersgd:rank=1", "topk", "int4:allocate=true", "int8:rounding=stochastic", "two_level:node=1"):
        with pytest.raises(gradwire.RegisterError, match="keeps state between steps"):
            gradwire.register(model, spec)
    with pytest.raises(gradwire.RegisterError, match="auto counts steps"):
        gradwire.register(model, "auto")
    hook = gradwire.register(model, "int8")
    with pytest.raises(gradwire.RegisterError, match="keeps state between steps"):
        hook.switch("topk")
    hook.close()
    with pytest.raises(gradwire.RegisterError, match="keeps state between steps"):
        powerSGD_hook(PowerSGDState(None), (torch.ones(2), torch.ones(2)))


@on_ranks(2, thorough=(4,))
def test_small_model_warns(ranks):
    """A rank that no matrix is worth is said, and averages exactly."""
    model = DDP(layers(1, 16))
    with pytest.warns(UserWarning, match=r"at rank=12 no matrix of this model would shrink .* 16 x 16"):
        hook = gradwire.register(model, "powersgd:rank=12")
    train(model, 2)
    check_replicas(model)
    model, third = DDP(layers(1, 16)), DDP(layers(1, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = gradwire.register(model, "powersgd:rank=2,min_compression=0.5")
        other_rank = gradwire.register(third, "powersgd:rank=3,min_compression=0.5")
    train(model, 3)
    saved = other.state_dict()
    with pytest.raises(gradwire.StateError, match=r"another rank or model; .*0\.weight \(2, 16\), here \(3, 16\)"):
        other_rank.load_state_dict(saved)
    for made in (hook, other, other_rank):
        made.close()


@pytest.mark.parametrize("start", [-1, 0, 1])
@pytest.mark.parametrize(("feedback", "warm"), [(True, True), (True, False), (False, True)])
def test_early_start_is_refused(start, feedback, warm):
    with pytest.raises(ValueError, match="Expect `start_powerSGD_iter` > 1"):
        PowerSGDState(None, 1, start, use_error_feedback=feedback, warm_start=warm)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"matrix_approximation_rank": 0}, "rank must be at least 1"),
        ({"min_compression_rate": 0}, "min_compression must be above 0"),
        ({"orthogonalization_epsilon": -1}, "must not be negative"),
        ({"start_powerSGD_iter": -1, "use_error_feedback": False, "warm_start": False}, "warmup must be at least 0"),
    ],
)
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        PowerSGDState(None, **settings)


def test_other_states_are_refused():
    with pytest.raises(SpecError, match="needs a PowerSGDState as its state, got NoneType"):
        powerSGD_hook(None, None)


def test_new_state_can_be_saved_without_a_process_group():
    state = PowerSGDState(None, 3, 17, 1.5, random_seed=5, compression_stats_logging_frequency=0)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file)
    assert (again.matrix_approximation_rank, again.start_powerSGD_iter, again.min_compression_rate) == (3, 17, 1.5)
    assert (again.random_seed, again.iter, again.process_group) == (5, 0, None)
    assert again.compression_stats_logging_frequency == 1
    assert again.compression_stats() == (0, 0, 0)
