"""The drop-in optimizer-overlap hooks, compared with ordinary training; and each bug of torch's as a test."""

import copy
import inspect
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as torchs
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire import ddp_comm_hooks
from gradwire.ddp_comm_hooks import default_hooks, optimizer_overlap, quantization_hooks
from gradwire.ddp_comm_hooks import optimizer_overlap_hooks as ours
from gradwire.errors import RegisterError

from ..kit.models import Complex, Deep, Picky, Pictures, Strided, batch, seeded
from ..kit.ranks import on_ranks
from ..kit.trial import loss
from ..kit.versions import complex_gradients

with warnings.catch_warnings():  # torch's functional optimizers are still scripted, which it deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import as_functional_optim
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
LR = 0.05
SMALL = {"bucket_cap_mb": 0.002}
KINDS = {
    "sgd": (torch.optim.SGD, {"lr": LR, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": LR}),
    "adamw": (torch.optim.AdamW, {"lr": LR}),
}
HOOKS = [
    default_hooks.allreduce_hook,
    default_hooks.bf16_compress_hook,
    default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    quantization_hooks.quantization_pertensor_hook,
]


def own_allreduce_hook(group, bucket):
    """A hook as users write it: it divides, reduces a copy, and leaves the bucket as it was."""
    work = dist.all_reduce(bucket.buffer().clone().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] if isinstance(done.value(), list) else done.value())


def train(model, rank, optimizer=None, count=20, prepare=lambda model, step: None):
    for step in range(count):
        prepare(model.module, step)
        for param in model.parameters():
            param.grad = None
        loss(model(batch(rank, step))).backward()
        if optimizer is not None:
            optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def overlapped(module, hook, kind="sgd", group=None, params=None, **ddp):
    model = DDP(copy.deepcopy(module), process_group=group, **ddp)
    chosen, options = KINDS[kind]
    state = optimizer_overlap._OptimizerHookState(as_functional_optim(chosen, **options), params and params(model))
    model.register_comm_hook(group or dist.group.WORLD, optimizer_overlap._hook_then_optimizer(hook, state))
    return model


def plain(module, hook, kind="sgd", group=None, params=None, **ddp):
    model = DDP(copy.deepcopy(module), process_group=group, **ddp)
    model.register_comm_hook(group or dist.group.WORLD, hook)
    chosen, options = KINDS[kind]
    return model, chosen(params(model) if params else model.parameters(), **options)


def compare(module, hook, rank, kind="sgd", count=4, prepare=lambda model, step: None, **options):
    """The same parameters as with the same hook and an ordinary optimizer."""
    model, optimizer = plain(module, hook, kind, **options)
    expected = train(model, rank, optimizer, count, prepare)
    got = train(overlapped(module, hook, kind, **options), rank, None, count, prepare)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_hooks_of_all_kinds(ranks):
    """Ours, wrapped ones, and users' own, also where the mean is not in the bucket (3.11, 3.17)."""
    for hook in (*HOOKS, own_allreduce_hook):
        compare(seeded(Deep, 4), hook, ranks.rank, **SMALL)


@on_ranks(2)
def test_optimizers(ranks):
    """20 steps of each optimizer that torch has a functional form of."""
    for kind in KINDS:
        compare(seeded(Deep, 3), default_hooks.allreduce_hook, ranks.rank, kind, count=20)


@on_ranks(2)
def test_some_parameters(ranks):
    """Only those in `params` are stepped."""
    compare(seeded(Deep, 3), HOOKS[0], ranks.rank, params=lambda model: list(model.parameters())[:3])


@on_ranks(2)
def test_odd_layouts(ranks):
    """Strides (3.14)."""
    for view in (False, True):
        for make in (Pictures, Strided):
            compare(seeded(make), HOOKS[0], ranks.rank, "adamw", gradient_as_bucket_view=view)


@complex_gradients
@on_ranks(2)
def test_complex_parameters(ranks):
    """Complex numbers (3.15)."""
    compare(seeded(Complex), HOOKS[0], ranks.rank)


@on_ranks(2, thorough=(4,))
def test_unused_parameters(ranks):
    """Not stepped if no rank used it, stepped on all if one did (3.32)."""

    def prepare(module, step):
        module.use = (step % 2, 2 + (step + ranks.rank) % 2)

    for view in (False, True):
        ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        compare(seeded(Picky, 5), HOOKS[0], ranks.rank, prepare=prepare, **ddp, **SMALL)


@on_ranks(thorough=(4,))
def test_sub_groups_average_separately(ranks):
    """Each group averages for itself (3.12)."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[ranks.rank // 2]
    with torch.no_grad():
        (module := nn.Linear(2, 1, bias=False)).weight.zero_()
    for hook in (default_hooks.allreduce_hook, own_allreduce_hook):
        model = DDP(copy.deepcopy(module), process_group=mine)
        state = optimizer_overlap._OptimizerHookState(as_functional_optim(torch.optim.SGD, lr=1.0))
        model.register_comm_hook(mine, optimizer_overlap._hook_then_optimizer(hook, state))
        model(torch.full((1, 2), float(ranks.rank))).sum().backward()
        assert model.module.weight.tolist() == [[-0.5 - 2 * (ranks.rank // 2)] * 2]
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    model = DDP(module, process_group=mine)
    optimizer_overlap.register_optim_in_backward(model)
    model(torch.full((1, 2), float(ranks.rank))).sum().backward()
    assert model.module.weight.tolist() == [[-0.5 - 2 * (ranks.rank // 2)] * 2]


@on_ranks(2, thorough=(4,))
def test_optimizers_in_backward(ranks):
    """Optimizers of `_apply_optimizer_in_backward`, on CPU (3.30), registered by DDP itself or by us."""

    def prepare(module, step):
        module.use = (step % 2, 2 + (step + ranks.rank) % 2)

    cases = [(seeded(Deep, 4), SMALL, lambda *_: None), (seeded(Strided), {}, lambda *_: None)]
    cases += [(seeded(Picky, 5), {"find_unused_parameters": True, **SMALL}, prepare)]
    patched = mock.patch.object(
        torchs, "_apply_optim_in_backward_hook", optimizer_overlap._apply_optim_in_backward_hook
    )
    for module, ddp, prepared in cases:
        for view in (False, True):
            ddp = {**ddp, "gradient_as_bucket_view": view}
            model, optimizer = plain(module, default_hooks.allreduce_hook, **ddp)
            expected = train(model, ranks.rank, optimizer, 4, prepared)
            for by_ddp in (True, False):
                model = DDP(with_optimizers(copy.deepcopy(module)), **ddp)
                with patched:
                    if not by_ddp:
                        optimizer_overlap.register_optim_in_backward(model)
                    got = train(model, ranks.rank, None, 4, prepared)
                assert all(param.grad is None for param in model.parameters())
                assert all(map(torch.equal, got, expected)), (type(module), view, by_ddp)


def with_optimizers(module, count=None):
    kind, options = KINDS["sgd"]
    _apply_optimizer_in_backward(kind, list(module.parameters())[:count], options)
    return module


@on_ranks(2)
def test_optimizers_in_backward_for_some_parameters(ranks):
    """A parameter without an optimizer in backward keeps its averaged gradient."""
    for by_ddp in (True, False):
        for view in (False, True):
            model = DDP(with_optimizers(seeded(Deep, 2), 1), gradient_as_bucket_view=view)
            exact = DDP(seeded(Deep, 2))
            hook = optimizer_overlap._apply_optim_in_backward_hook
            with mock.patch.object(torchs, "_apply_optim_in_backward_hook", hook):
                if not by_ddp:
                    optimizer_overlap.register_optim_in_backward(model)
                for run in (model, exact):
                    loss(run(batch(ranks.rank, 0))).backward()
            first, *others = model.parameters()
            assert first.grad is None
            for mine, theirs in zip(others, list(exact.parameters())[1:], strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda m, at=(by_ddp, view): f"{at}: {m}")


@on_ranks(2)
def test_what_cannot_work_is_refused(ranks):
    with pytest.raises(RegisterError, match="no parameter has an optimizer in backward"):
        optimizer_overlap.register_optim_in_backward(DDP(seeded(Deep, 2)))
    model = DDP(with_optimizers(seeded(Deep, 2)))
    optimizer_overlap.register_optim_in_backward(model)
    with pytest.raises(RegisterError, match="do not work under Join"):
        model._match_all_reduce_for_bwd_pass()


def test_optimizer_without_step_param_is_refused():
    with pytest.raises(ValueError, match=r"SGD.* must implement method step_param"):
        ours._OptimizerHookState(torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize("name", ["_OptimizerHookState", "_hook_then_optimizer", "_apply_optim_in_backward_hook"])
def test_same_parameters(name):
    mine, theirs = (list(inspect.signature(getattr(side, name)).parameters) for side in (ours, torchs))
    assert mine == theirs


def test_names():
    assert ddp_comm_hooks.optimizer_overlap is ours
    state = ours._OptimInBackwardHookState(optim_stream=None, wait_for_optim_stream_enqueued=False)
    assert not state.wait_for_optim_stream_enqueued
    hook = ours._apply_optim_in_backward_hook(gradient_is_bucket_view=True)
    assert hook.__name__ == "apply_optim_in_backward_hook"
    assert hook.__qualname__.endswith("apply_optim_in_backward_hook")
