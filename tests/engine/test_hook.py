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

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import AVERAGING, FEEDBACK, MAIN, SPECS, Ranks, on_ranks
from ..kit.trial import Trial, assert_near, loss, raised, residuals, same_everywhere


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


@on_ranks(1, 2, 4, thorough=(3,), specs=SPECS)
def test_stats_count_what_is_sent(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 3)).steps(3)
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


@on_ranks(2, specs=MAIN)
def test_evaluation_does_not_count_as_a_step(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 3)).steps(3)
    with torch.no_grad():
        trial.model.eval()(batch(ranks.rank, 3))
    assert trial.hook.steps == 3


@on_ranks(1, 2, 4, thorough=(3,), specs=SPECS)
def test_verify_after_training(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002).steps(3)
    found = trial.hook.verify()
    assert (found.hook, found.steps) == (ranks.spec, 3)
    assert found.identical == (ranks.size == 1 or ranks.spec != "noop")
    if ranks.size > 1 and ranks.spec != "noop":
        assert 0 <= found.error <= found.bound
    trial.steps(2, first=3)


@on_ranks(1, 2, specs=MAIN)
def test_verify_before_the_first_step_raises(ranks: Ranks) -> None:
    hook = ranks.register(ranks.wrap(seeded(models.Deep, 3)))
    assert "has not run" in raised(VerifyError, hook.verify)


@on_ranks(2, specs=MAIN)
def test_verify_finds_that_ddp_was_bypassed(ranks: Ranks) -> None:
    """Training `model.module` goes past the hook: verify must say so."""
    model = ranks.wrap(seeded(models.Deep, 3))
    hook = ranks.register(model)
    loss(model.module(batch(ranks.rank, 0))).backward()
    assert "model.module" in raised(VerifyError, hook.verify)


@on_ranks(2, thorough=(3,), specs=AVERAGING)
def test_verify_finds_a_parameter_changed_by_hand(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 3)).steps(3)
    changed = trial.model.module.layers[1].bias
    if ranks.rank == ranks.size - 1:
        with torch.no_grad():
            changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    text = raised(VerifyError, trial.hook.verify)
    assert "layers.1.bias" in text
    assert "1 parameter" in text


@on_ranks(2, thorough=(3,), specs=SPECS)
def test_switch_between_steps(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002, register={"spec": "exact"})
    trial.steps(2)
    trial.hook.switch(ranks.spec)
    assert trial.hook.stats().hook == ranks.spec
    trial.steps(2, first=2)
    assert (trial.hook.stats().steps, trial.hook.steps) == (2, 4)
    if ranks.spec != "noop":
        trial.hook.switch("bf16:shots=two")
        trial.pending = 3 * ranks.exchange.bound(ranks.size) if ranks.exchange.takes_residual else 0.0
        trial.steps(1, first=4)
        trial.pending = 0.0  # the residual has been applied
        trial.steps(1, first=5)
        trial.hook.switch(ranks.spec)
        assert trial.hook.verify().steps == 6


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_switch_to_different_hooks_raises(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 3)).steps(3)
    text = raised(RegisterError, lambda: trial.hook.switch("fp16" if ranks.rank == 0 else "exact"))
    assert "rank 0 'fp16'" in text
    assert "rank 1 'exact'" in text
    trial.steps(1, first=3)


@on_ranks(2, 4, thorough=(3,), specs=FEEDBACK)
def test_feedback_conserves_gradients(ranks: Ranks) -> None:
    """What was averaged plus what is kept is what came in, over all steps, buckets cut anew included."""
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002).steps(5)
    lost = sum(trial.means) - sum(trial.emitted)
    kept = residuals(trial.hook)
    names = [name for name, _ in trial.model.module.named_parameters()]
    mean = ranks.sum_(torch.cat([kept[name] for name in names]).double()) / ranks.size
    assert float(lost.norm()) > 0
    assert_near(mean, lost, 1e-5 * float(sum(trial.means).norm()), "residuals")
    assert float((mean - lost).norm()) < 0.1 * float(lost.norm())


@on_ranks(2, 4, thorough=(3,), specs=FEEDBACK)
def test_switching_feedback_off_applies_the_residual(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002).steps(4)
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
    trial.steps(2, first=5)


@on_ranks(1, 2, specs=MAIN)
def test_close(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 3)).steps(3)
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


@on_ranks(2, specs=("exact", "bf16:shots=two"))
def test_threads_end_with_the_model(ranks: Ranks) -> None:
    before = engine_threads()
    trial = Trial(ranks, seeded(models.Deep, 3)).steps(3)
    started = engine_threads() - before
    assert started
    ranks.hooks.clear()
    del trial
    gc.collect()
    for thread in started:
        thread.join(10)
    assert not started & engine_threads(), "threads outlive their model"


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_is_last_is_set_on_the_last_bucket_only(ranks: Ranks) -> None:
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


@on_ranks(2, thorough=(3,), specs=("exact",))
def test_auto_picks_the_same_hook_on_all_ranks(ranks: Ranks) -> None:
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
