"""Residuals belong to parameters: they survive re-cut buckets, switches and checkpoints."""

import math

import pytest
import torch

from gradwire.engine.checkpoint import pack
from gradwire.engine.fingerprint import sealed
from gradwire.engine.residuals import Residuals
from gradwire.errors import StateError
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import thread_ranks
from gradwire.testing.contracts import gaussian

SPEC = "bf16:feedback=true"


def test_residuals_follow_their_parameters_to_new_buckets():
    residuals = Residuals()
    residuals.of(make_bucket([torch.zeros(2), torch.zeros(3)], ["a", "b"])).copy_(torch.arange(5.0))
    again = residuals.of(make_bucket([torch.zeros(3), torch.zeros(2), torch.zeros(1)], ["b", "a", "c"]))
    assert again.tolist() == [2, 3, 4, 0, 1, 0]
    again.add_(1)
    assert {name: owed.tolist() for name, owed in residuals.copies().items()} == {
        "a": [1, 2],
        "b": [3, 4, 5],
        "c": [1],
    }


def test_what_is_due_is_due_until_every_chunk_is_paid():
    residuals, bucket = Residuals(), make_bucket([torch.zeros(2)], ["a"])
    assert residuals.pending(bucket) is None
    residuals.of(bucket).fill_(5)
    yes, no = torch.tensor(True), torch.tensor(False)
    for flags in ([yes, no], []):
        owed, paid = residuals.pending(bucket)
        assert owed.tolist() == [5, 5]
        paid.extend(flags)
    residuals.pending(bucket)[1].extend([yes, yes])
    assert not residuals.copies()
    assert residuals.pending(bucket) is None
    assert residuals.of(bucket).tolist() == [0, 0]


def test_what_was_applied_in_a_bucket_of_before_is_not_dropped_again():
    """DDP cuts its buckets anew while a residual from before a switch is applied, and feedback comes back later."""
    residuals, yes = Residuals(), torch.tensor(True)
    before, after = (make_bucket([torch.zeros(2)] * 2, names) for names in (["a", "b"], ["b", "a"]))
    residuals.of(before)
    for bucket in (before, after):
        residuals.pending(bucket)[1].append(yes)
    residuals.of(after).fill_(5)
    assert residuals.copies().keys() == {"a", "b"}


def test_a_residual_of_another_size_is_refused():
    residuals = Residuals()
    residuals.load({"a": torch.ones(3)})
    with pytest.raises(StateError, match="another model"):
        residuals.of(make_bucket([torch.zeros(2)], ["a"]))


def test_scale():
    residuals = Residuals()
    residuals.load({"a": torch.ones(3)})
    residuals.scale_(0.5)
    assert residuals.copies()["a"].tolist() == [0.5] * 3


def run_steps(rank, hook, steps, numel=500):
    for step in steps:
        bucket = make_bucket([gaussian(numel, seed=10 * rank.rank + step)])
        hook.begin(bucket)
        hook.mean(bucket).wait()
    return bucket.flat


@pytest.mark.parametrize("size", [2, 3])
def test_resume_is_exact(size):
    def run(rank):
        whole = run_steps(rank, rank.hook(SPEC), range(6))
        first = rank.hook(SPEC)
        run_steps(rank, first, range(3))
        second = rank.hook(SPEC)
        second.load_state_dict(first.state_dict())
        assert second.steps == 3
        return torch.equal(run_steps(rank, second, range(3, 6)), whole)

    assert thread_ranks(size, run) == [True] * size


def test_another_number_of_ranks_starts_from_the_sum():
    """Three ranks save, two load: from one merged state, or from the list of all three."""

    def save(rank):
        hook = rank.hook(SPEC)
        run_steps(rank, hook, range(2))
        return hook.state_dict(), hook.state_dict(merged=True)

    saved = thread_ranks(3, save)
    parts, merged = [part for part, _ in saved], saved[0][1]
    total = sum(part["residuals"]["0"] for part in parts)
    torch.testing.assert_close(merged["residuals"]["0"], total)

    def load(rank):
        hooks = rank.hook(SPEC), rank.hook(SPEC)
        hooks[0].load_state_dict(merged)
        hooks[1].load_state_dict(parts)
        return [hook.state_dict()["residuals"]["0"] for hook in hooks]

    for from_merged, from_parts in thread_ranks(2, load):
        torch.testing.assert_close(from_merged, total / 2)
        torch.testing.assert_close(from_parts, total / 2)


def test_switching_feedback_off_pays_what_is_owed():
    def run(rank):
        hook, numel = rank.hook(SPEC), 300
        emitted = run_steps(rank, hook, [0], numel).double()
        hook.switch("exact")
        emitted += run_steps(rank, hook, [1], numel).double()
        assert not hook.state_dict()["residuals"]
        return emitted

    wanted = sum(gaussian(300, seed=10 * rank + step).double() for rank in range(2) for step in range(2)) / 2
    for emitted in thread_ranks(2, run):
        torch.testing.assert_close(emitted, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "missing: memory, rank, residuals, size, step; version: None"),
        ({**pack("x", 1, 0, 2, {}), "version": 99}, "version: 99"),
        (pack("x", 1, 1, 2, {"0": torch.ones(2)}), "rank 1 of 2 given to rank 0 of 1"),
        ([pack("x", 1, rank, 3, {"0": torch.ones(2)}) for rank in (0, 2)], "list of all ranks' states"),
        ([], "no state given"),
        (5, "a state is what Hook.state_dict"),
        ("x", "a state is what Hook.state_dict"),
        ([pack("x", 1, 0, 1, {}), 5], "a state is what Hook.state_dict"),
        ({**pack("x", 1, 0, 1, {}), "step": -4}, "damaged: step is a whole number of at least 0, not -4"),
        ({**pack("x", 1, 0, 1, {}), "step": "a"}, "damaged: step"),
        ({**pack("x", 1, 0, 1, {}), "residuals": 5}, "damaged: its residuals and memory"),
        ({**pack("x", 1, 0, 1, {}), "residuals": {"0": 5}}, "damaged: its residuals and memory"),
        ({**pack("x", 1, 0, 1, {}), "memory": {"0": 5}}, "damaged: its residuals and memory"),
    ],
    ids=str,
)
def test_wrong_states_are_refused_and_leave_the_hook_as_it_was(state, text):
    def run(rank):
        hook = rank.hook(SPEC)
        with pytest.raises(StateError, match=text):
            hook.load_state_dict(state)
        return hook.state_dict()

    assert thread_ranks(1, run) == [pack(SPEC, 0, 0, 1, {})]


def test_inf_does_not_enter_the_residual():
    def run(rank):
        hook = rank.hook(SPEC)
        bucket = make_bucket([torch.full((4,), math.inf)])
        hook.mean(bucket).wait()
        return hook.state_dict()["residuals"]["0"]

    assert all(not residual.any() for residual in thread_ranks(2, run))


def test_a_debt_outlives_a_step_with_an_inf_after_a_switch():
    def run(rank):
        hook = rank.hook("topk:exempt=none")
        run_steps(rank, hook, [0])
        owed = hook.state_dict()["residuals"]["0"]
        hook.switch("exact")
        bad = gaussian(500, seed=1)
        bad[3] = math.inf
        hook.mean(make_bucket([bad])).wait()
        kept = hook.state_dict()["residuals"]["0"]
        paid = make_bucket([torch.zeros(500)])
        hook.mean(paid).wait()
        return owed, kept, paid.flat, hook.state_dict()["residuals"]

    outcomes = thread_ranks(2, run)
    for owed, kept, paid, left in outcomes:
        assert owed.any()
        assert torch.equal(owed, kept)
        torch.testing.assert_close(paid, (outcomes[0][0] + outcomes[1][0]) / 2)
        assert not left


def test_what_16_bits_cannot_hold_is_owed_all_the_same():
    """A value that is never sent adds up, also where gradient and debt together would round to the debt."""

    def run(rank):
        hook, steps = rank.hook("topk:ratio=0.01,exempt=none,block=1024"), 300
        grad = torch.zeros(32, 32)
        grad[0, :10], grad[5, 5] = 1e6, 1.0
        for _ in range(steps):
            hook.mean(make_bucket([grad.bfloat16()])).wait()
        return hook.state_dict()["residuals"]["0"].view(32, 32)[5, 5].item()

    assert thread_ranks(2, run) == [300.0, 300.0]


def test_a_state_of_another_hook_is_named(caplog):
    state = thread_ranks(1, lambda rank: (hook := rank.hook(SPEC), run_steps(rank, hook, [0]), hook.state_dict())[2])[0]
    state["residuals"] = {"0": torch.ones(500)}

    def run(rank):
        rank.hook("exact").load_state_dict(sealed(state))

    thread_ranks(1, run)
    assert f"the checkpoint is of '{SPEC}', this hook is 'exact'" in caplog.text
