"""torch.compile in its three forms with every hook: the same gradients as without, or a refusal that names the hook.

1. A compiled module inside DDP, and 2. a compiled DDP: the C++ reducer calls the hook, which is not traced.
3. Compiled autograd with DDP's Python reducer: the hook is traced, one gradient at a time, here with `fullgraph=True`.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.ddp_comm_hooks
from gradwire.ddp_comm_hooks import default_hooks as default
from gradwire.ddp_comm_hooks import mixed_precision_hooks as mixed
from gradwire.ddp_comm_hooks import optimizer_overlap_hooks as overlap
from gradwire.ddp_comm_hooks import powerSGD_hook as power_sgd
from gradwire.ddp_comm_hooks import quantization_hooks as quantization
from gradwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from gradwire.ddp_comm_hooks.debugging_hooks import noop_hook
from gradwire.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from gradwire.exchanges import EXCHANGES, POLICIES, exchange
from gradwire.testing import spawn_ranks

from ..kit.versions import compiled_codecs

STEPS = 4
"""PowerSGD compresses in the last two, and ZeRO steps in them."""

KEEP_STATE = ["int8:feedback=true", "int8:rounding=stochastic", "int4:allocate=true", "two_level:node=1"]
SPECS = [*EXCHANGES, *KEEP_STATE, "auto"]
REFUSED_SPECS = {"powersgd", "topk", *KEEP_STATE, "auto"}

PLAIN = {
    "allreduce_hook": default.allreduce_hook,
    "fp16_compress_hook": default.fp16_compress_hook,
    "bf16_compress_hook": default.bf16_compress_hook,
    "fp16_compress_wrapper": default.fp16_compress_wrapper(default.allreduce_hook),
    "bf16_compress_wrapper": default.bf16_compress_wrapper(quantization.quantization_perchannel_hook),
    "quantization_pertensor_hook": quantization.quantization_pertensor_hook,
    "quantization_perchannel_hook": quantization.quantization_perchannel_hook,
    "noop_hook": noop_hook,
}
REFUSED_HOOKS = {
    "powerSGD_hook": "powerSGD_hook keeps state between steps",
    "batched_powerSGD_hook": "powerSGD_hook keeps state between steps",
    "post_localSGD_hook": "post_localSGD_hook counts steps",
    "_hook_then_optimizer": "stepping an optimizer in the hook needs buckets",
    "_apply_optim_in_backward_hook": "stepping optimizers in the hook needs buckets",
    "hook_with_zero_step": "a ZeRO step needs buckets",
    "hook_with_zero_step_interleaved": "a ZeRO step needs buckets",
}
HOOKS = [*PLAIN, *REFUSED_HOOKS]
QUICK_SPECS = ["exact", "int8", "int8:rounding=stochastic", "powersgd", "two_level:node=1", "auto"]
QUICK_HOOKS = ["fp16_compress_hook", "powerSGD_hook", "_apply_optim_in_backward_hook", "hook_with_zero_step"]
"""One of each kind; the hook itself is not traced in these two forms. The others run in `make test-all`."""


def make_net():
    """One matrix that is large enough to be encoded by every codec, and a bias."""
    torch.manual_seed(0)
    return nn.Linear(32, 40)


def steps_of(model, forward, rank, context=None):
    """Gradients and parameters of all steps."""
    kept = []
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = forward(x).tanh().square().sum()
        if context is None:
            loss.backward()
        else:
            with context():
                loss.backward()
        for param in model.parameters():
            kept += [param.detach().clone(), torch.zeros(0) if param.grad is None else param.grad.clone()]
    return kept


def register(model, name):
    """Give a DDP model the exchange or drop-in hook of this name."""
    if name in SPECS:
        gradwire.register(model, name)
        return
    state, hook = None, PLAIN.get(name)
    if name in ("powerSGD_hook", "batched_powerSGD_hook"):
        state, hook = power_sgd.PowerSGDState(None, start_powerSGD_iter=2), getattr(power_sgd, name)
    elif name == "post_localSGD_hook":
        state, hook = PostLocalSGDState(None, None, 2), post_localSGD_hook
    elif name == "_hook_then_optimizer":
        hook = overlap._hook_then_optimizer(default.allreduce_hook, overlap._OptimizerHookState(Descent()))
    elif name == "_apply_optim_in_backward_hook":
        give_optimizers(model)
        return
    elif name.startswith("hook_with_zero_step"):
        hook = zero_hook(name, model)
    model.register_comm_hook(state, hook)


class Descent:
    """A functional optimizer."""

    def step_param(self, param, grad):
        with torch.no_grad():
            param.add_(grad, alpha=-0.1)


def give_optimizers(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 0.1})
    overlap.register_optim_in_backward(model)


def zero_hook(name, model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    make = hook_with_zero_step if name == "hook_with_zero_step" else hook_with_zero_step_interleaved
    return make(default.allreduce_hook, model, zero)


def uncompiled(rank, name):
    model = DDP(make_net())
    register(model, name)
    return steps_of(model, model, rank)


def compiled_module(rank, name):
    model = DDP(torch.compile(make_net(), backend="eager"))
    register(model, name)
    return steps_of(model, model, rank)


def compiled_ddp(rank, name):
    """Specs are registered on what torch.compile returned, as torch's own `register_comm_hook` allows it."""
    model = DDP(make_net())
    compiled = torch.compile(model, backend="eager")
    register(compiled if name in SPECS else model, name)
    return steps_of(model, compiled, rank)


def compiled_autograd(rank, name, backend="eager", fullgraph=True):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DDP(make_net())
        register(model, name)
        forward = torch.compile(model, backend=backend, fullgraph=True)
        compiler = torch.compile(backend=backend, fullgraph=fullgraph)
        return steps_of(model, forward, rank, lambda: torch._dynamo.compiled_autograd._enable(compiler))


def compare(rank, size, names, forms):
    """For each hook and form the largest difference from the result without torch.compile, over the largest value."""
    results = {}
    for name in names:
        expected = uncompiled(rank, name)
        for form in forms:
            torch.compiler.reset()
            results[name, form.__name__] = difference(form(rank, name), expected)
    return results


def difference(got, expected):
    pairs = zip(got, expected, strict=True)
    worst = max(float((a - b).abs().max()) if a.numel() else float(b.numel()) for a, b in pairs)
    return worst / max(float(value.abs().max()) for value in expected if value.numel())


def python_reducer(rank, name):
    """What the hook is called with under compiled autograd, without the time to compile."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DDP(make_net())
        register(model, name)
        return steps_of(model, model, rank)


def errors_of(rank, size, names, form, options):
    """For each hook the error that it raises."""
    errors = {}
    for name in names:
        torch.compiler.reset()
        try:
            form(rank, name, **options)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def inductor(rank, size, name):
    expected = uncompiled(rank, name)
    got = compiled_autograd(rank, name, backend="inductor")
    return difference(got, expected)


def spawn(run, *args):
    return spawn_ranks(2, run, *args, timeout_s=1100)


def check_same(names, *forms):
    for results in spawn(compare, names, forms):
        assert results == {(name, form.__name__): 0.0 for name in names for form in forms}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "specs", [QUICK_SPECS, pytest.param(sorted({*SPECS} - {*QUICK_SPECS}), marks=pytest.mark.thorough)], ids=len
)
def test_compiled_module_and_compiled_ddp_with_every_exchange(specs):
    """Some draw random numbers by parameter name: those of a compiled module must be those of the module."""
    check_same(specs, compiled_module, compiled_ddp)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "hooks", [QUICK_HOOKS, pytest.param(sorted({*HOOKS} - {*QUICK_HOOKS}), marks=pytest.mark.thorough)], ids=len
)
def test_compiled_module_and_compiled_ddp_with_every_drop_in_hook(hooks):
    check_same(hooks, compiled_module, compiled_ddp)


@pytest.mark.timeout(1200)
def test_compiled_autograd_with_half_precision_hooks():
    """PyTorch's own test of these hooks, on the CPU."""
    check_same(["fp16_compress_hook", "bf16_compress_hook"], compiled_autograd)


@compiled_codecs
@pytest.mark.timeout(1200)
def test_compiled_autograd_with_a_codec():
    check_same(["int4"], compiled_autograd)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.thorough
def test_compiled_autograd_with_every_drop_in_hook_that_works_without_buckets():
    check_same([name for name in PLAIN if name != "quantization_pertensor_hook"], compiled_autograd)


@pytest.mark.timeout(1200)
@pytest.mark.thorough
def test_compiled_autograd_with_one_scale_per_gradient():
    """The hook has one scale per bucket otherwise, so both round, each value by up to half a step of 1/127."""
    for results in spawn(compare, ["quantization_pertensor_hook"], [compiled_autograd]):
        assert max(results.values()) <= 2 * 0.5 / 127


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.thorough
def test_compiled_autograd_with_every_exchange_that_keeps_no_state():
    check_same([spec for spec in SPECS if spec not in REFUSED_SPECS], compiled_autograd)


@pytest.mark.timeout(1200)
def test_python_reducer_refuses_by_name():
    """Exchanges that keep state when they are registered, and hooks that need buckets when they are called."""
    for errors in spawn(errors_of, [*REFUSED_SPECS, *REFUSED_HOOKS], python_reducer, {}):
        assert errors.pop("auto").startswith("RegisterError: auto counts steps")
        for name, error in errors.items():
            reason = REFUSED_HOOKS.get(name, f"{exchange(name) if name in SPECS else name} keeps state between steps")
            assert error.startswith(f"RegisterError: {reason}")
            assert "set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'" in error
        assert errors.keys() == REFUSED_SPECS - {"auto"} | REFUSED_HOOKS.keys()


@pytest.mark.timeout(1200)
@pytest.mark.thorough
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_autograd_refuses_hooks_that_need_buckets(fullgraph):
    """With `fullgraph=True` dynamo raises an error of its own, which quotes ours."""
    for errors in spawn(errors_of, list(REFUSED_HOOKS), compiled_autograd, {"fullgraph": fullgraph}):
        for name, reason in REFUSED_HOOKS.items():
            assert errors[name].startswith("Unsupported: Observed" if fullgraph else "RegisterError: ")
            assert reason in errors[name]


def test_the_hook_of_mixed_precision_refuses_compiled_autograd():
    """DDP's mixed precision itself needs an accelerator, so here DDP's call is made by hand."""
    pair = torch.ones(2), nn.Parameter(torch.ones(2))
    with pytest.raises(gradwire.RegisterError, match="the hook of DDP's mixed_precision needs buckets"):
        mixed._reducer_allreduce_and_upcast_hook(mixed._AllreduceUpcastHookState(None, None), pair)


@pytest.mark.timeout(1200)
@pytest.mark.thorough
def test_compiled_autograd_with_inductor():
    for worst in spawn(inductor, "fp16_compress_hook"):
        assert worst <= 2**-10  # the compiler may fuse a product and a sum, which moves a float16 by one step


def test_every_drop_in_hook_is_covered():
    hooks = {kind.value.keywords["comm_hook"].__qualname__ for kind in gradwire.ddp_comm_hooks.DDPCommHookType}
    assert hooks <= {*HOOKS}
    assert {"fp16_compress_wrapper", "bf16_compress_wrapper"} <= {*default.__all__} <= {*HOOKS}


def test_every_exchange_is_covered():
    assert {*EXCHANGES, *POLICIES} <= {spec.partition(":")[0] for spec in SPECS}
