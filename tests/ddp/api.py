"""What a user asks of a Hook, with DDP around it."""

from __future__ import annotations

import gc
import threading

import torch
import torch.distributed as dist

from gradwire import Bucket, ExchangeError, RegisterError, VerifyError
from gradwire.auto.pilot import TURN_STEPS, WARM_STEPS
from gradwire.auto.trial import MOST_ROUNDS
from gradwire.exchanges import Coded, Exact, Exchange, Noop

from . import models
from .kit import ALL_SIZES, AVERAGING, FEEDBACK, SPECS, UNEVEN, Ranks, check
from .models import batch, seeded
from .trial import Trial, assert_near, loss, raised, residuals, same_everywhere


def steps(ranks: Ranks, trial: Trial, first: int = 0, count: int = 3) -> Trial:
    for step in range(first, first + count):
        trial.step(batch(ranks.rank, step))
    return trial


def sent_bytes(exchange: Exchange, bucket: Bucket, size: int) -> float | None:
    """What a rank sends for one chunk of float32 gradients; None for an exchange with no formula here."""
    ring, numel = 2 * (size - 1) / size, bucket.flat.numel()
    if isinstance(exchange, Noop) or size == 1:
        return 0
    if isinstance(exchange, Exact):
        return 4 * numel * ring
    if not isinstance(exchange, Coded):
        return None
    if exchange.accumulate == "wire":
        return 2 * numel * ring
    if exchange.shots == "one" or (exchange.shots == "auto" and size == 2):
        return exchange.plan(bucket, 1).wire_bytes * (size - 1)
    return 2 * exchange.plan(bucket, size).wire_bytes * (size - 1)


@check(sizes=ALL_SIZES, specs=SPECS)
def stats_count_what_is_sent(ranks: Ranks) -> None:
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 3)))
    stats = trial.hook.stats()
    layout = trial.hook.layouts[0]
    flat = torch.empty(sum(segment.numel for segment in layout))
    expected = sent_bytes(ranks.exchange, Bucket(0, flat, layout, True), ranks.size)
    assert (stats.hook, stats.steps, stats.buckets) == (ranks.spec, 3, 1)
    assert expected is None or stats.sent_bytes == stats.received_bytes == expected, stats
    assert min(stats.encode_s, stats.wire_s, stats.decode_s, stats.wait_s) >= 0
    assert (stats.wire_s > 0) == bool(ranks.size > 1 and ranks.exchange.lanes)
    trial.hook.reset_stats()
    assert trial.hook.stats().steps == 0
    assert trial.hook.steps == 3


@check()
def evaluation_is_no_step(ranks: Ranks) -> None:
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 3)))
    with torch.no_grad():
        trial.model.eval()(batch(ranks.rank, 3))
    assert trial.hook.steps == 3


@check(sizes=ALL_SIZES, specs=SPECS)
def verify_after_training(ranks: Ranks) -> None:
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002))
    found = trial.hook.verify()
    assert (found.hook, found.steps) == (ranks.spec, 3)
    assert found.identical == (ranks.size == 1 or ranks.spec != "noop")
    if ranks.size > 1 and ranks.spec != "noop":
        assert 0 <= found.error <= found.bound
    steps(ranks, trial, 3, 2)


@check(sizes=(1, 2))
def verify_before_any_step(ranks: Ranks) -> None:
    hook = ranks.register(ranks.wrap(seeded(models.Deep, 3)))
    assert "has not run" in raised(VerifyError, hook.verify)


@check()
def verify_without_the_ddp_module(ranks: Ranks) -> None:
    """Training `model.module` goes past the hook: verify must say so."""
    model = ranks.wrap(seeded(models.Deep, 3))
    hook = ranks.register(model)
    loss(model.module(batch(ranks.rank, 0))).backward()
    assert "model.module" in raised(VerifyError, hook.verify)


@check(sizes=UNEVEN, specs=AVERAGING)
def verify_finds_a_parameter_changed_by_hand(ranks: Ranks) -> None:
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 3)))
    changed = trial.model.module.layers[1].bias
    if ranks.rank == ranks.size - 1:
        with torch.no_grad():
            changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    text = raised(VerifyError, trial.hook.verify)
    assert "layers.1.bias" in text
    assert "1 parameter" in text


@check(sizes=UNEVEN, specs=SPECS)
def switching_between_steps(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002, register={"spec": "exact"})
    steps(ranks, trial, 0, 2)
    trial.hook.switch(ranks.spec)
    assert trial.hook.stats().hook == ranks.spec
    steps(ranks, trial, 2, 2)
    assert (trial.hook.stats().steps, trial.hook.steps) == (2, 4)
    if ranks.spec != "noop":
        trial.hook.switch("bf16:shots=two")
        trial.debt = 3 * ranks.exchange.bound(ranks.size) if ranks.exchange.takes_residual else 0.0
        steps(ranks, trial, 4, 1)
        trial.debt = 0.0  # paid
        steps(ranks, trial, 5, 1)
        trial.hook.switch(ranks.spec)
        assert trial.hook.verify().steps == 6


@check(sizes=UNEVEN)
def ranks_that_switch_to_different_hooks(ranks: Ranks) -> None:
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 3)))
    text = raised(RegisterError, lambda: trial.hook.switch("fp16" if ranks.rank == 0 else "exact"))
    assert "rank 0 'fp16'" in text
    assert "rank 1 'exact'" in text
    steps(ranks, trial, 3, 1)


@check(sizes=(2, 3, 4), specs=FEEDBACK)
def feedback_loses_nothing(ranks: Ranks) -> None:
    """What was averaged plus what is kept is what came in, over all steps, buckets cut anew included."""
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002), 0, 5)
    lost = sum(trial.means) - sum(trial.emitted)
    kept = residuals(trial.hook)
    names = [name for name, _ in trial.model.module.named_parameters()]
    mean = ranks.sum_(torch.cat([kept[name] for name in names]).double()) / ranks.size
    assert float(lost.norm()) > 0
    assert_near(mean, lost, 1e-5 * float(sum(trial.means).norm()), "residuals")
    assert float((mean - lost).norm()) < 0.1 * float(lost.norm())


@check(sizes=(2, 3, 4), specs=FEEDBACK)
def switching_feedback_off_pays_what_is_owed(ranks: Ranks) -> None:
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002), 0, 4)
    lost = float((sum(trial.means) - sum(trial.emitted)).norm())
    trial.hook.switch("exact")
    local = trial.local(batch(ranks.rank, 4))
    trial.backward(batch(ranks.rank, 4))
    got = torch.cat([param.grad.double().reshape(-1) for param in trial.params])
    own = torch.cat([grad.double().reshape(-1) for grad in local])
    total = sum(trial.means) + ranks.sum_(own) / ranks.size
    assert_near(sum(trial.emitted) + got, total, 0.1 * lost, "all steps together")
    assert not residuals(trial.hook)
    trial.optimizer.step()
    same_everywhere(trial.params, ranks.group)
    steps(ranks, trial, 5, 2)


@check(sizes=(1, 2))
def closing(ranks: Ranks) -> None:
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 3)))
    assert not trial.hook.closed
    trial.hook.close()
    trial.hook.close()
    assert trial.hook.closed
    text = raised((RuntimeError, ExchangeError), lambda: trial.backward(batch(ranks.rank, 3)))
    assert "this hook is closed" in text
    assert "closed" in raised(ExchangeError, lambda: trial.hook.switch("exact"))
    trial.hook.close()


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gradwire-")}


@check(specs=("exact", "bf16:shots=two"))
def threads_end_with_the_model(ranks: Ranks) -> None:
    before = engine_threads()
    trial = steps(ranks, Trial(ranks, seeded(models.Deep, 3)))
    started = engine_threads() - before
    assert started
    ranks.hooks.clear()
    del trial
    gc.collect()
    for thread in started:
        thread.join(10)
    assert not started & engine_threads(), "threads outlive their model"


@check(sizes=UNEVEN)
def is_last_comes_once_and_last(ranks: Ranks) -> None:
    """An 11-layer model, as in torch's own test."""
    trial = Trial(ranks, seeded(models.Deep, 11), bucket_cap_mb=0.001)
    seen: list[tuple[int, bool]] = []
    begin = trial.hook.begin
    trial.hook.begin = lambda bucket: (seen.append((bucket.index, bucket.is_last)), begin(bucket))[1]
    for step in range(4):
        seen.clear()
        trial.step(batch(ranks.rank, step))
        assert [index for index, _ in seen] == list(range(len(seen)))
        assert [last for _, last in seen] == [False] * (len(seen) - 1) + [True]
    assert len(seen) >= 11


@check(sizes=(2, 3), specs=("exact",))
def auto_picks_one_for_all(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 3), bucket_cap_mb=0.002)
    hook = ranks.register(model, "auto", hooks=["bf16", "int8"], max_error=0.05)
    for step in range(WARM_STEPS + 3 + 3 * (1 + MOST_ROUNDS * TURN_STEPS)):  # if none of the three drops out early
        model(batch(ranks.rank, step)).sum().backward()
        if hook.stats().reason != "measuring":
            break
    picked: list[str] = [""] * ranks.size
    dist.all_gather_object(picked, f"{hook.exchange} {hook.stats().reason}", group=ranks.group)
    assert len(set(picked)) == 1, picked
    assert "ms per step of the slowest rank" in picked[0]
    assert hook.verify().identical
