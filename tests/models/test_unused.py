"""Law 4 under `find_unused_parameters=True`: DDP discards the mean of a parameter that no rank has used."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.engine.observers import Observer

from ..kit.ranks import Ranks, on_ranks
from ..kit.trial import gather, residuals

WITH_FEEDBACK = ("topk:ratio=0.1,exempt=none", "powersgd:rank=2,min_compression=0.5", "sign:feedback=true,exempt=none")
PATTERNS = {
    "every other step": lambda rank, step: step % 2 == 0,
    "on one rank": lambda rank, step: rank == 0 and step % 3 == 0,
    "in the first steps": lambda rank, step: step < 3,
}


class Branch(nn.Module):
    """`side` is used only on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.main, self.side = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, use_side: bool) -> Tensor:
        return self.main(x) + self.side(x) if use_side else self.main(x)


def local_side_grad(module: Branch, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(module(x, True).square().sum(), [module.side.weight])
    return grad


@on_ranks(2, specs=WITH_FEEDBACK)
def test_nothing_is_lost_whatever_is_used(ranks: Ranks) -> None:
    for used in PATTERNS.values():
        module = Branch()
        model = ranks.wrap(module, find_unused_parameters=True)
        hook = ranks.register(model)
        came = torch.zeros(24, 24, dtype=torch.float64)
        left = torch.zeros_like(came)
        for step in range(7):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * ranks.rank + step))
            if used(ranks.rank, step):
                came += local_side_grad(module, x)
            model.zero_grad()
            model(x, used(ranks.rank, step)).square().sum().backward()
            if module.side.weight.grad is not None:
                left += module.side.weight.grad
        kept = residuals(hook)["side.weight"].double().view(24, 24)
        total = gather(came.view(-1), ranks.group).mean(0)
        have = left.view(-1) + gather(kept.reshape(-1), ranks.group).mean(0)
        torch.testing.assert_close(have, total, rtol=0, atol=1e-4 * float(total.norm()))
        assert float(left.norm()) > 0.1 * float(total.norm())  # it does arrive, too


@on_ranks(2)
def test_what_a_switch_left_to_apply_waits_for_a_step_that_uses_it(ranks: Ranks) -> None:
    module = Branch()
    model = ranks.wrap(module, find_unused_parameters=True)
    hook = ranks.register(model, "topk:ratio=0.1,exempt=none")
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(ranks.rank))
    model(x, True).square().sum().backward()
    pending = gather(residuals(hook)["side.weight"], ranks.group).mean(0)
    assert pending.norm() > 0
    hook.switch("exact")
    for use_side in (False, True):
        model.zero_grad()
        expected = gather(local_side_grad(module, x).reshape(-1), ranks.group).mean(0) + pending
        model(x, use_side).square().sum().backward()
        if use_side:
            torch.testing.assert_close(module.side.weight.grad.view(-1), expected)
        else:
            assert module.side.weight.grad is None
    assert not hook.state_dict()["residuals"]


@on_ranks(2)
def test_an_interrupted_backward_says_what_to_do(ranks: Ranks) -> None:
    model = ranks.wrap(nn.Linear(4, 4))
    hook = ranks.register(model, "int8")

    class Interrupt(Observer):
        def before_mean(self, bucket: gradwire.Bucket, first: bool) -> None:
            raise KeyboardInterrupt

    hook.observers.append(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(gradwire.ExchangeError, match=r"wrap copy.deepcopy\(model.module\)"):
        model(torch.ones(2, 4))
    again = ranks.wrap(copy.deepcopy(model.module))
    ranks.register(again, "int8")
    again(torch.ones(2, 4)).sum().backward()
