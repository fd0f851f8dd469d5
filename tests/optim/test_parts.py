"""Which optimizers can be stepped in parts, and which are refused."""

import pytest
import torch
from torch import nn

from gradwire.errors import RegisterError
from gradwire.optim.parts import Parts, check_optimizer


def params():
    made = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(3, 5))]
    return [{"params": made[:2]}, {"params": made[2:]}]


SPLITS = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "RMSprop",
    "Rprop",
    "Adagrad",
    "Adadelta",
    "ASGD",
    "Adafactor",
]


@pytest.mark.parametrize("kind", SPLITS)
def test_torchs_optimizers_can_be_stepped_in_parts(kind):
    """Trying out leaves the optimizer and the random state as they were."""
    torch.manual_seed(0)
    made = getattr(torch.optim, kind)(params(), lr=0.1)
    before, random = [p.detach().clone() for p in Parts(made).params], torch.random.get_rng_state()
    check_optimizer(made)
    assert all(map(torch.equal, before, Parts(made).params))
    assert all(p.grad is None for p in Parts(made).params)
    assert all("step" not in state or float(state["step"]) == 0 for state in made.state.values())
    assert torch.equal(random, torch.random.get_rng_state())


class Coupled(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm)


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad / group["k"])


class CountingItself(torch.optim.SGD):
    made = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.made += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * self.made)


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + torch.randn_like(p))


class WantsClosure(torch.optim.SGD):
    def step(self, closure=None):
        if closure is None:
            raise ValueError("a closure, please")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Coupled, "Coupled cannot be stepped in parts: its step on a parameter depends on the other parameters"),
        (Counting, "Counting cannot be stepped in parts"),
        (CountingItself, "CountingItself cannot be stepped in parts"),
        (Noisy, "Noisy draws random numbers"),
        (WantsClosure, "trial failed with: a closure, please"),
        (torch.optim.SparseAdam, "trial failed with: SparseAdam does not support dense gradients"),
    ],
)
def test_optimizers_that_cannot_be_stepped_in_parts_are_refused(kind, match):
    with pytest.raises(RegisterError, match=match):
        check_optimizer(kind(params(), lr=0.1))


def test_closures_and_wrappers_are_refused():
    flat = [p for group in params() for p in group["params"]]
    with pytest.raises(RegisterError, match="LBFGS needs a closure"):
        check_optimizer(torch.optim.LBFGS(flat))
    with pytest.raises(RegisterError, match=r"must be a torch.optim.Optimizer, got list"):
        check_optimizer(flat)
    replaced = torch.optim.SGD(flat, lr=0.1)
    replaced.step = lambda: None
    with pytest.raises(RegisterError, match=r"step\(\) of this SGD was replaced"):
        check_optimizer(replaced)


def test_optimizers_that_communicate_are_refused():
    class Talking(torch.optim.SGD):
        __module__ = "torch.distributed.optim.somewhere"

    with pytest.raises(RegisterError, match="communicates with other ranks"):
        check_optimizer(Talking(params(), lr=0.1))
