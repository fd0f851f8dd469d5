"""The drift guard: ranks whose parameters differ are found within the interval, by name, on all ranks."""

from __future__ import annotations

import torch

from gradwire import RegisterError, SpecError, VerifyError

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.trial import Trial, raised

FLIPS = 25
"""On each of 4 ranks: 100 in all."""


def trial_of(ranks: Ranks, every: int = 2, **options: object) -> Trial:
    return Trial(ranks, seeded(models.Deep, 3), register={"check_every": every}, **options)


def step(ranks: Ranks, trial: Trial, number: int) -> None:
    trial.backward(batch(ranks.rank, number))
    trial.optimizer.step()


@on_ranks(2, 4, specs=("exact", "int8", "fp16:feedback=true", "powersgd:rank=1,min_compression=0.5"))
def test_equal_ranks_train_as_without_a_guard(ranks: Ranks) -> None:
    plain, guarded = Trial(ranks, seeded(models.Deep, 3)), trial_of(ranks, 1)
    for number in range(5):
        step(ranks, plain, number)
        step(ranks, guarded, number)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(guarded.params, plain.params, strict=True))
    assert guarded.hook.stats().sent_bytes == plain.hook.stats().sent_bytes


@on_ranks(4, specs=("int8",))
def test_every_flipped_bit_is_found(ranks: Ranks) -> None:
    """A hundred single bits: in every rank, in any parameter, at any place. The guard names both."""
    trial = trial_of(ranks, 1)
    step(ranks, trial, 0)
    names = [name for name, _ in trial.model.module.named_parameters()]
    draw = torch.Generator().manual_seed(3)
    for _ in range(FLIPS * ranks.size):
        victim, which, place, bit = (int(torch.randint(2**30, (), generator=draw)) for _ in range(4))
        victim, which = victim % ranks.size, which % len(names)
        bits = trial.params[which].detach().view(-1).view(torch.uint8)
        place, flip = place % bits.numel(), 1 << bit % 8
        if ranks.rank == victim:
            bits[place] ^= flip
        (guard,) = trial.hook.observers
        guard.on_step()
        text = raised(VerifyError, guard.on_step)
        assert f"rank {victim} differs from the others in 1 of 6 parameters, first {names[which]!r}" in text
        if ranks.rank == victim:
            bits[place] ^= flip
        guard._asked = None


@on_ranks(2, specs=("int8",))
def test_drift_is_found_within_the_interval(ranks: Ranks) -> None:
    trial = trial_of(ranks, 3)
    step(ranks, trial, 0)
    with torch.no_grad():
        trial.params[2].view(-1)[5] += ranks.rank
    step(ranks, trial, 1)
    step(ranks, trial, 2)  # the third: the ranks exchange
    text = raised(RuntimeError, lambda: step(ranks, trial, 3))
    assert "at the beginning of step 3" in text
    assert "first 'layers.1.weight'" in text
    assert "At step 0 they were the same" in text


@on_ranks(2)
def test_a_guard_that_cannot_work_is_refused(ranks: Ranks) -> None:
    for wrong in (0, -1, True, 2.5, "5"):
        model = ranks.wrap(seeded(models.Deep, 2))
        text = raised(SpecError, lambda model=model, wrong=wrong: ranks.register(model, "int8", check_every=wrong))
        assert "check_every must be a whole number of steps of at least 1" in text
    model = ranks.wrap(seeded(models.Deep, 2))
    assert "the ranks differ on purpose" in raised(RegisterError, lambda: ranks.register(model, "noop", check_every=5))
    model = ranks.wrap(seeded(models.Deep, 2))
    text = raised(RegisterError, lambda: ranks.register(model, "int8", check_every=5 + ranks.rank))
    assert "same check_every, got rank 0 '5', rank 1 '6'" in text
