"""What the ranks of the step-in-backward tests run: training with it against training without, bit for bit."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.exchanges import EXCHANGES
from gradwire.optim import step_in_backward

from ..ddp.models import Deep, Picky, Reusing, Tied, batch, seeded
from ..ddp.odd import Complex, Embedded, Pictures, Strided, rows
from ..ddp.trial import loss

SPECS = [
    *(name for name in EXCHANGES if name not in ("noop", "powersgd")),
    "powersgd:rank=1,warmup=1",
    "int2:feedback=true,exempt=none",
    "fp16:accumulate=wire",
]
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


# -- the same bits ---------------------------------------------------------------------------------------------------


def every_exchange(rank, size):
    """Several buckets, cut anew after the first step."""
    for number, spec in enumerate(SPECS):
        compare(seeded(Deep, 6), adamw, steps(rank, 3), spec=spec, set_to_none=(number % 2 == 0,), **SMALL)


def optimizers(rank, size):
    kinds = [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adafactor]
    makes = [sgd, momentum, adamw, *(lambda p, kind=kind: kind(p, lr=1e-2) for kind in kinds)]
    makes += [lambda p, options=options: adamw(p, **options) for options in ({"foreach": True}, {"fused": True})]
    for make in makes:
        compare(seeded(Deep, 4), make, steps(rank), set_to_none=(True,), **SMALL)


def groups_and_schedules(rank, size):
    """Groups of their own settings; a scheduler made before or after; settings changed by hand."""

    def make(params):
        params = list(params)
        return adamw([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "weight_decay": 0.0}])

    def train(run):
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=10)]
        for step in range(5):
            run.step(batch(rank, step))
            for scheduler in schedulers:
                scheduler.step()
        run.optimizer.param_groups[1]["lr"] = 0.5
        run.step(batch(rank, 6))

    compare(seeded(Deep, 4), make, train, **SMALL)
    late = Run(seeded(Deep, 2), momentum, False)
    scheduler = torch.optim.lr_scheduler.StepLR(late.optimizer, 1, 0.1)
    step_in_backward(late.model, late.optimizer)
    late.step(batch(rank, 0))
    scheduler.step()
    assert late.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def unused(rank, size):
    """A parameter that no rank uses is not stepped, one that some rank uses is stepped on all (torch's 3.32)."""

    def train(run, differ=True, **zero):
        for step in range(4):
            run.model.module.use = (step % 2, 2 + (step + rank * differ) % 2)
            run.step(batch(rank, step), **zero)

    def train_zeroed(run):
        train(run, set_to_none=False)

    def train_alike(run):
        train(run, differ=False)

    compare(seeded(Picky, 5), momentum, train, find_unused_parameters=True, **SMALL)
    compare(seeded(Picky, 5), momentum, train, find_unused_parameters=True, gradient_as_bucket_view=True, **SMALL)
    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    compare(seeded(Picky, 5), momentum, train_alike, **skipping, **SMALL)
    for spec in ("exact", "fp16:feedback=true"):
        compare(seeded(Picky, 5), momentum, train_zeroed, spec=spec, find_unused_parameters=True, set_to_none=(False,))
    run = Run(seeded(Picky, 5), momentum, True, find_unused_parameters=True)
    before = run.model.module.layers[4].weight.detach().clone()
    train(run)
    assert torch.equal(before, run.model.module.layers[4].weight), "stepped without a gradient"
    assert run.model.module.layers[4].weight not in run.optimizer.state


def accumulation(rank, size):
    """Nothing is stepped under no_sync."""

    def train(run):
        for step in range(3):
            run.step(*(batch(rank, 10 * step + part) for part in range(3)))

    for view in (False, True):
        compare(seeded(Deep, 4), momentum, train, gradient_as_bucket_view=view, **SMALL)
    run = Run(seeded(Deep, 2), momentum, True)
    before = run.values()
    with run.model.no_sync():
        loss(run.model(batch(rank, 0))).backward()
    same(before, run.values())


def no_sync_alone(rank, size):
    """A step on gradients that were never averaged is the optimizer's own."""
    runs = [Run(seeded(Deep, 2), momentum, inside) for inside in (False, True)]
    for run in runs:
        with run.model.no_sync():
            loss(run.model(batch(rank, 0))).backward()
        run.optimizer.step()
    same(runs[0].values(), runs[1].values())


def odd(rank, size):
    """Strides, complex numbers, sparse gradients, tied weights, static graphs."""
    for view in (False, True):
        compare(seeded(Pictures), adamw, steps(rank), gradient_as_bucket_view=view)
        compare(seeded(Strided), adamw, steps(rank), gradient_as_bucket_view=view)
        compare(seeded(Complex), adamw, steps(rank), gradient_as_bucket_view=view)
    compare(seeded(Embedded), sgd, steps(rank, make=rows), set_to_none=(False,))
    compare(seeded(Tied), adamw, steps(rank))
    compare(seeded(Reusing, 3), adamw, steps(rank), static_graph=True, **SMALL)


def frozen(rank, size):
    """Parameters without gradients may be in the optimizer; parameters of the model may be in none."""
    module = seeded(Deep, 3)
    module.layers[1].requires_grad_(False)
    compare(module, adamw, steps(rank))
    compare(module, lambda params: adamw(list(params)[:2]), steps(rank), set_to_none=(False,))


def run(rank, size, names):
    from . import in_backward_life  # which imports this module

    torch.manual_seed(0)
    for name in names:
        {**vars(in_backward_life), **globals()}[name](rank, size)
        dist.barrier()
