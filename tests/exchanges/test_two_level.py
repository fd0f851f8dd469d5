"""Two levels: what crosses between nodes, and what is refused. The contracts are in tests/exchanges."""

import pytest
import torch

from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges import exchange
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import thread_ranks
from gradwire.testing.contracts import gaussian

from .test_contracts import TWO_LEVEL


@pytest.mark.parametrize("spec", [spec for spec, _ in TWO_LEVEL])
def test_spec_round_trips(spec):
    made = exchange(spec)
    assert exchange(str(made)) == made


def test_inf_leaves_the_residual_unchanged():
    def main(rank):
        hook = rank.hook(exchange("two_level:across=int4(feedback=true),node=2"))
        hook.mean(make_bucket([gaussian(4096, seed=rank.rank).view(64, 64)])).wait()
        before = hook.state_dict()["residuals"]["0"]
        bad = gaussian(4096, seed=9)
        bad[70] = float("inf")
        bucket = make_bucket([bad.view(64, 64)])
        hook.mean(bucket).wait()
        after = hook.state_dict()["residuals"]["0"]
        return bool(before.any()), torch.isfinite(bucket.flat[70]), before, after

    for has_residual, finite, before, after in thread_ranks(4, main):
        assert has_residual
        assert not finite
        torch.testing.assert_close(before, after)


def test_node_sends_every_value_across_once():
    """Two nodes of two: exact inside costs 3 bytes a value a rank and a half, and int8 across half a byte."""
    numel = 65_536

    def main(rank):
        sent = {}
        for spec in ("two_level:across=int8,node=2", "two_level:across=exact,node=2"):
            hook, bucket = rank.hook(exchange(spec)), make_bucket([gaussian(numel).view(256, 256)])
            hook.begin(bucket)
            hook.mean(bucket).wait()
            sent[spec] = hook.stats().sent_bytes
        return sent

    for sent in thread_ranks(4, main):
        coded, exact = sent.values()
        inside = 4 * numel + 4 * numel / 2  # all-reduce among two, and the gather of halves
        assert coded - inside == pytest.approx(numel / 2, rel=0.02)
        assert exact - inside == pytest.approx(4 * numel / 2, rel=0.02)


def test_nodes_come_from_torchrun(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def main(rank):
        bucket = make_bucket([torch.full((8, 8), float(rank.rank))])
        rank.hook(exchange("two_level:across=exact")).mean(bucket).wait()
        return bucket.flat

    for mean in thread_ranks(4, main):
        assert torch.equal(mean, torch.full((64,), 1.5))


def test_switching_back_and_forth():
    def main(rank):
        hook = rank.hook("bf16")
        means = []
        for spec in ("two_level:across=exact,node=2", "exact", "two_level:across=int8,node=2", "bf16"):
            hook.switch(spec)
            bucket = make_bucket([torch.full((40, 40), float(rank.rank))])
            hook.mean(bucket).wait()
            means.append(bucket.flat)
        return means

    for means in thread_ranks(4, main):
        for mean in means:
            torch.testing.assert_close(mean, torch.full((1600,), 1.5), rtol=1e-2, atol=0)


def test_returning_to_two_level_reuses_its_connections():
    """As under `auto`, where hooks change at every step."""

    def main(rank):
        two, one = exchange("two_level:across=int8,node=2"), exchange("exact")
        hook, levels, means = rank.hook(two), [], []
        for made in (two, one, two, one, two):
            hook.use(made, agreed=True)
            levels.append(hook.runner.lanes._levels)
            bucket = make_bucket([torch.full((40, 40), float(rank.rank))])
            hook.mean(bucket).wait()
            means.append(bucket.flat)
        return [len(each) for each in levels], levels[0] is levels[2] is levels[4], means

    for sizes, same, means in thread_ranks(4, main):
        assert sizes == [2, 0, 2, 0, 2]
        assert same
        for mean in means:
            torch.testing.assert_close(mean, torch.full((1600,), 1.5), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("two_level:node=0", "node, the number of ranks of a node, must be at least 1"),
        ("two_level:across=noop", "across=noop does not average"),
        ("two_level:across=powersgd", "across=powersgd cannot be a part of it"),
        ("two_level:inside=int2(feedback=true)", "feedback is for the slow level"),
        ("two_level:across=two_level", "cannot be a part of it"),
        ("two_level:across=int9", "unknown hook 'int9'"),
        ("two_level:outside=int8", "unknown option 'outside'"),
    ],
)
def test_bad_options(spec, said):
    with pytest.raises(SpecError, match=said):
        exchange(spec)


def test_ranks_that_do_not_split_into_nodes_are_refused(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def main(rank):
        for spec, said in (
            ("two_level:node=2", "3 ranks do not split into nodes of 2"),
            ("two_level", "LOCAL_WORLD_SIZE is not set"),
        ):
            with pytest.raises(SpecError, match=said):
                rank.hook(exchange(spec))

    thread_ranks(3, main)


def test_ranks_that_disagree_on_nodes_are_refused(monkeypatch):
    def main(rank):
        with pytest.raises(RegisterError, match="all ranks must ask for the same"):
            rank.hook(exchange(f"two_level:node={1 + rank.rank % 2}"))

    thread_ranks(2, main)


def applied_by_zeros(hook, numel, steps=150):
    """All that comes out while nothing goes in."""
    total = torch.zeros(numel)
    for _ in range(steps):
        bucket = make_bucket([torch.zeros(numel).view(64, -1)])
        hook.mean(bucket).wait()
        total += bucket.flat
    return total


def test_residuals_of_other_ranks_parts_are_applied():
    """A merged checkpoint and a switch leave residuals in all parts, not only in the one that a rank sends across."""
    spec = "two_level:node=2,across=topk(exempt=none)"

    def main(rank):
        residual_hook = rank.hook("topk:exempt=none")
        residual_hook.mean(make_bucket([gaussian(4096, seed=rank.rank).view(64, 64)])).wait()
        state = residual_hook.state_dict(merged=True)
        loaded = rank.hook(spec)
        loaded.load_state_dict(state)
        residual_hook.switch(spec)
        return state["residuals"]["0"] / 4, applied_by_zeros(loaded, 4096), applied_by_zeros(residual_hook, 4096)

    for pending, after_load, after_switch in thread_ranks(4, main):
        for applied in (after_load, after_switch):
            assert float((applied - pending).norm()) < 0.01 * float(pending.norm())


def test_refused_switch_keeps_the_levels():
    def main(rank):
        hook = rank.hook("two_level:node=1,across=int8")
        with pytest.raises(RegisterError, match="all ranks must ask for the same hook"):
            hook.switch("int8" if rank.rank else "fp16")
        bucket = make_bucket([torch.full((64, 64), float(rank.rank))])
        hook.mean(bucket).wait()
        return bucket.flat

    for mean in thread_ranks(2, main):
        torch.testing.assert_close(mean, torch.full((4096,), 0.5), rtol=0.01, atol=0)


def test_parts_check_the_model():
    made, params = exchange("two_level:node=1,across=int4(exempt=.*)"), [("w", torch.zeros(64, 64))]
    with pytest.raises(SpecError, match="matches all 1 parameters"):
        made.check(params)
