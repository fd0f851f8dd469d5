"""Stepping in backward inside a training script: checkpoints, hooks, uneven inputs; and what is refused."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.errors import RegisterError
from gradwire.optim import step_in_backward

from ..kit.models import Deep, batch, seeded
from ..kit.ranks import on_ranks
from ..kit.trial import loss
from .runs import SMALL, Run, adamw, momentum, same, steps


@on_ranks(2)
def test_checkpoint(ranks):
    """A checkpoint is the optimizer's own, and goes on with or without stepping in backward."""
    whole = Run(seeded(Deep, 3), adamw, True)
    steps(ranks.rank, 3)(whole)
    module, saved = copy.deepcopy(whole.model.module), copy.deepcopy(whole.optimizer.state_dict())
    whole.step(batch(ranks.rank, 9))
    for inside in (True, False):
        resumed = Run(module, adamw, inside)
        resumed.optimizer.load_state_dict(copy.deepcopy(saved))
        resumed.step(batch(ranks.rank, 9))
        same(whole.values(), resumed.values())


@on_ranks(2)
def test_close(ranks):
    """After close() the optimizer steps after backward; and it can be begun again."""
    plain, run = Run(seeded(Deep, 3), adamw, False), Run(seeded(Deep, 3), adamw, True)
    for turn in range(4):
        plain.step(batch(ranks.rank, turn))
        run.step(batch(ranks.rank, turn))
        same(plain.values(), run.values())
        if turn == 0:
            run.inside.close()
            run.inside.close()
            assert "step" not in vars(run.optimizer)
        if turn == 2:
            step_in_backward(run.model, run.optimizer)
    assert run.inside.steps == 1


@on_ranks(2)
def test_hooks_of_the_optimizer_run_once_per_step(ranks):
    """Also with several buckets, which are stepped one by one."""
    run, calls = Run(seeded(Deep, 3), adamw, True, **SMALL), []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    steps(ranks.rank, 2)(run)
    assert calls == ["pre", "post"] * 2


@on_ranks(2)
def test_uneven_inputs(ranks):
    """Ranks with fewer batches end up where the others do."""
    runs = [Run(seeded(Deep, 3), momentum, inside) for inside in (False, True)]
    for run in runs:
        with Join([run.model]):
            steps(ranks.rank, 2 + ranks.rank)(run)
    for mine, other in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(mine, other)


@on_ranks(2)
def test_last_layers_are_stepped_during_backward(ranks):
    """The last layers are stepped, and their own gradients let go, while backward is still at the first."""
    run = Run(seeded(Deep, 6), momentum, True, set_to_none=True, **SMALL)
    run.step(batch(ranks.rank, 0))
    last, seen = run.model.module.layers[-1].weight, []
    version = last._version

    def wait(_):
        deadline = time.monotonic() + 30
        while last._version == version and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append((last._version > version, last.grad.untyped_storage().nbytes() > last.nbytes))

    run.model.module.layers[0].weight.register_hook(wait)
    run.step(batch(ranks.rank, 1))
    assert seen == [(True, True)]


# -- refusals --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_misuse_is_refused(ranks):
    """What came too late to have an effect is an error, never silence."""

    def refused(match, act, spec="exact", scale=1.0):
        run = Run(seeded(Deep, 2), momentum, True, spec)
        (scale * loss(run.model(batch(ranks.rank, 0)))).backward()
        with pytest.raises(RegisterError, match=match):
            act(run)

    refused("second backward pass", lambda run: loss(run.model(batch(ranks.rank, 1))).backward())
    refused("closure", lambda run: run.optimizer.step(lambda: 0.0))

    def clip(run):
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()

    refused("gradients were changed", clip)
    refused("gradients were changed", lambda run: (run.optimizer.zero_grad(), run.optimizer.step()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    refused("GradScaler", lambda run: scaler.step(run.optimizer))
    off = Run(seeded(Deep, 2), momentum, True)
    loss(off.model(batch(ranks.rank, 0))).backward()
    torch.amp.GradScaler("cpu", enabled=False).step(off.optimizer)


@on_ranks(2)
def test_bad_registration_is_refused(ranks):
    bare, hooked = DDP(seeded(Deep, 2)), Run(seeded(Deep, 2), momentum, True)
    with pytest.raises(RegisterError, match="carries no gradwire hook"):
        step_in_backward(bare, momentum(bare.parameters()))
    with pytest.raises(RegisterError, match="must be a DistributedDataParallel, got Deep"):
        step_in_backward(bare.module, momentum(bare.parameters()))
    with pytest.raises(RegisterError, match="stepped in backward already"):
        step_in_backward(hooked.model, momentum(hooked.model.parameters()))
    free = Run(seeded(Deep, 2), momentum, False)
    with pytest.raises(RegisterError, match=r"step\(\) of this SGD was replaced"):
        step_in_backward(free.model, hooked.optimizer)
    with pytest.raises(RegisterError, match="2 parameters of the optimizer are in no bucket"):
        step_in_backward(free.model, momentum([*free.model.parameters(), *nn.Linear(2, 2).parameters()]))
    free.step(batch(ranks.rank, 0))
    free.model.module.layers[0].weight._in_backward_optimizers = []
    with pytest.raises(RegisterError, match="_apply_optimizer_in_backward"):
        step_in_backward(free.model, free.optimizer)
    hooked.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RegisterError, match="1 parameters of the optimizer are in no bucket"):
        hooked.step(batch(ranks.rank, 0))
