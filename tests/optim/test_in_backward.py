"""Stepping in backward gives the same bits as stepping after it, for every exchange, optimizer and mode of DDP."""

import pytest
import torch

from gradwire.exchanges import EXCHANGES
from gradwire.optim import step_in_backward

from ..kit.models import Complex, Deep, Embedded, Picky, Pictures, Reusing, Strided, Tied, batch, rows, seeded
from ..kit.ranks import on_ranks
from ..kit.trial import loss
from ..kit.versions import complex_gradients, ddp_option
from .runs import SMALL, Run, adamw, compare, momentum, same, sgd, steps

SPECS = [
    *(name for name in EXCHANGES if name not in ("noop", "powersgd")),
    "powersgd:rank=1,warmup=1",
    "int2:feedback=true,exempt=none",
    "fp16:accumulate=wire",
]


# -- the same bits ---------------------------------------------------------------------------------------------------
@on_ranks(2, thorough=(4,))
def test_every_exchange(ranks):
    """Several buckets, cut anew after the first step."""
    for number, spec in enumerate(SPECS):
        compare(seeded(Deep, 6), adamw, steps(ranks.rank, 3), spec=spec, set_to_none=(number % 2 == 0,), **SMALL)


@on_ranks(2)
def test_optimizers(ranks):
    kinds = [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adafactor]
    makes = [sgd, momentum, adamw, *(lambda p, kind=kind: kind(p, lr=1e-2) for kind in kinds)]
    makes += [lambda p, options=options: adamw(p, **options) for options in ({"foreach": True}, {"fused": True})]
    for make in makes:
        compare(seeded(Deep, 4), make, steps(ranks.rank), set_to_none=(True,), **SMALL)


@on_ranks(2)
def test_groups_and_schedules(ranks):
    """Groups of their own settings; a scheduler made before or after; settings changed by hand."""

    def make(params):
        params = list(params)
        return adamw([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "weight_decay": 0.0}])

    def train(run):
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=10)]
        for step in range(5):
            run.step(batch(ranks.rank, step))
            for scheduler in schedulers:
                scheduler.step()
        run.optimizer.param_groups[1]["lr"] = 0.5
        run.step(batch(ranks.rank, 6))

    compare(seeded(Deep, 4), make, train, **SMALL)
    late = Run(seeded(Deep, 2), momentum, False)
    scheduler = torch.optim.lr_scheduler.StepLR(late.optimizer, 1, 0.1)
    step_in_backward(late.model, late.optimizer)
    late.step(batch(ranks.rank, 0))
    scheduler.step()
    assert late.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@on_ranks(2, thorough=(4,))
def test_unused_parameters(ranks):
    """A parameter that no rank uses is not stepped, one that some rank uses is stepped on all (torch's 3.32)."""

    def train(run, **zero):
        for step in range(4):
            run.model.module.use = (step % 2, 2 + (step + ranks.rank) % 2)
            run.step(batch(ranks.rank, step), **zero)

    def train_zeroed(run):
        train(run, set_to_none=False)

    compare(seeded(Picky, 5), momentum, train, find_unused_parameters=True, **SMALL)
    compare(seeded(Picky, 5), momentum, train, find_unused_parameters=True, gradient_as_bucket_view=True, **SMALL)
    for spec in ("exact", "fp16:feedback=true"):
        compare(seeded(Picky, 5), momentum, train_zeroed, spec=spec, find_unused_parameters=True, set_to_none=(False,))
    run = Run(seeded(Picky, 5), momentum, True, find_unused_parameters=True)
    before = run.model.module.layers[4].weight.detach().clone()
    train(run)
    assert torch.equal(before, run.model.module.layers[4].weight), "stepped without a gradient"
    assert run.model.module.layers[4].weight not in run.optimizer.state


@ddp_option("skip_all_reduce_unused_params")
@on_ranks(2, thorough=(4,))
def test_unused_parameters_that_ddp_does_not_average(ranks):
    def train(run):
        for step in range(4):
            run.model.module.use = (step % 2, 2 + step % 2)
            run.step(batch(ranks.rank, step))

    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    compare(seeded(Picky, 5), momentum, train, **skipping, **SMALL)


@on_ranks(2, thorough=(4,))
def test_gradient_accumulation(ranks):
    """Nothing is stepped under no_sync."""

    def train(run):
        for step in range(3):
            run.step(*(batch(ranks.rank, 10 * step + part) for part in range(3)))

    for view in (False, True):
        compare(seeded(Deep, 4), momentum, train, gradient_as_bucket_view=view, **SMALL)
    run = Run(seeded(Deep, 2), momentum, True)
    before = run.values()
    with run.model.no_sync():
        loss(run.model(batch(ranks.rank, 0))).backward()
    same(before, run.values())


@on_ranks(2)
def test_step_on_local_gradients(ranks):
    """A step on gradients that were never averaged is the optimizer's own."""
    runs = [Run(seeded(Deep, 2), momentum, inside) for inside in (False, True)]
    for run in runs:
        with run.model.no_sync():
            loss(run.model(batch(ranks.rank, 0))).backward()
        run.optimizer.step()
    same(runs[0].values(), runs[1].values())


@on_ranks(2)
def test_odd_layouts_and_types(ranks):
    """Strides, sparse gradients, tied weights, static graphs."""
    for view in (False, True):
        compare(seeded(Pictures), adamw, steps(ranks.rank), gradient_as_bucket_view=view)
        compare(seeded(Strided), adamw, steps(ranks.rank), gradient_as_bucket_view=view)
    compare(seeded(Embedded), sgd, steps(ranks.rank, make=rows), set_to_none=(False,))
    compare(seeded(Tied), adamw, steps(ranks.rank))
    compare(seeded(Reusing, 3), adamw, steps(ranks.rank), static_graph=True, **SMALL)


@complex_gradients
@on_ranks(2)
def test_complex_parameters(ranks):
    for view in (False, True):
        compare(seeded(Complex), adamw, steps(ranks.rank), gradient_as_bucket_view=view)


@on_ranks(2)
def test_frozen_parameters(ranks):
    """Parameters without gradients may be in the optimizer; parameters of the model may be in none."""
    module = seeded(Deep, 3)
    module.layers[1].requires_grad_(False)
    compare(module, adamw, steps(ranks.rank))
    compare(module, lambda params: adamw(list(params)[:2]), steps(ranks.rank), set_to_none=(False,))
