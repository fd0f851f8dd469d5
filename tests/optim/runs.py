"""Training with stepping in backward and without it, to compare the two bit for bit."""

import copy
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.optim import step_in_backward

from ..kit.models import batch
from ..kit.trial import loss

SMALL = {"bucket_cap_mb": 0.002}


def adamw(params, **options):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, **options)


def sgd(params):
    return torch.optim.SGD(params, lr=1e-2)


def momentum(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1)


class Run:
    """A model in training, with or without stepping in backward."""

    def __init__(self, module, make, inside, spec="int8", set_to_none=False, **ddp):
        self.model = DDP(copy.deepcopy(module), **ddp)
        self.hook = gradwire.register(self.model, spec)
        self.optimizer = make(self.model.parameters())
        self.steps = 0
        self.inside = step_in_backward(self.model, self.optimizer, set_to_none=set_to_none) if inside else None

    def step(self, *batches, **zero_options):
        self.steps += 1
        self.optimizer.zero_grad(**zero_options)
        for number, x in enumerate(batches, 1):
            with self.model.no_sync() if number < len(batches) else nullcontext():
                loss(self.model(x)).backward()
        self.optimizer.step()

    def values(self):
        """Everything that training has made so far."""
        tensors = [param.detach().clone() for param in self.model.parameters()]
        for _, state in sorted(self.optimizer.state_dict()["state"].items()):
            tensors += [value.clone() for value in state.values() if isinstance(value, torch.Tensor)]
        return tensors


def same(a, b):
    assert len(a) == len(b)
    assert all(torch.equal(x.to_dense(), y.to_dense()) for x, y in zip(a, b, strict=True))


def compare(module, make, train, *, spec="int8", set_to_none=(False, True), **ddp):
    """`train(run)` comes to the same parameters and optimizer state both ways."""
    plain = Run(module, make, False, spec, **ddp)
    train(plain)
    for none in set_to_none:
        inside = Run(module, make, True, spec, none, **ddp)
        train(inside)
        assert inside.inside.steps == inside.steps > 0
        same(plain.values(), inside.values())
        if none:
            assert all(param.grad is None for param in inside.model.parameters())
        else:
            same(*([p.grad for p in run.model.parameters() if p.grad is not None] for run in (plain, inside)))
        inside.hook.close()
    plain.hook.close()


def steps(rank, count=4, make=batch):
    return lambda run: [run.step(make(rank, step)) for step in range(count)]
