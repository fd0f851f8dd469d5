"""Checkpoints of local training: in the middle of a round, and on another number of ranks."""

import io

import pytest
import torch

from gradwire.engine.fingerprint import sealed
from gradwire.errors import RegisterError
from gradwire.optim import DiLoCo, LocalSGD

from ..kit.local import SPECS, Net, on_ranks, train, values


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 3)])
def test_resuming_in_the_middle_of_a_round_is_exact(spec, fragments, delay):
    """Step 13 of rounds of 5: some fragments have had their turn, and with a delay one is under way."""

    def make(rank, group):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        rounds = DiLoCo(
            model, optimizer, sync_every=5, exchange=spec, fragments=fragments, delay=delay, process_group=group
        )
        return model, optimizer, rounds

    def run(rank, group):
        model, optimizer, rounds = make(rank, group)
        with rounds:
            train(model, optimizer, rank.rank, range(13))
            assert len(rounds.transfers) == (1 if delay else 0)
            saved = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), rounds.state_dict()], saved)
            train(model, optimizer, rank.rank, range(13, 20))
            wanted = values(model)
        states = torch.load(io.BytesIO(saved.getvalue()))
        resumed, inner, again = make(rank, group)
        for part, state in zip((resumed, inner, again), states, strict=True):
            part.load_state_dict(state)
        with again:
            assert again.steps == 13
            train(resumed, inner, rank.rank, range(13, 20))
            assert torch.equal(values(resumed), wanted)
        assert again.hook.steps == rounds.hook.steps
        return values(resumed), values(model)

    for resumed, whole in on_ranks(2, run):
        assert torch.equal(resumed, whole)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize("merged", [True, False])
def test_resuming_on_another_number_of_ranks(old, new, merged):
    """Global values and momentum are taken over, the residuals keep their sum, and training goes on."""
    settings = {"sync_every": 5, "exchange": "int4:exempt=none,feedback=true", "fragments": 2, "delay": 3}

    def first(rank, group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, process_group=group, **settings) as rounds:
            train(model, optimizer, rank.rank, range(13))
            return rounds.state_dict(merged=merged)

    states = on_ranks(old, first)
    given = states[0] if merged else states

    def second(rank, group):
        model = Net(seed=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rounds = DiLoCo(model, optimizer, process_group=group, **settings)
        rounds.load_state_dict(given)
        loaded, start = rounds.state_dict(), values(model)
        with rounds:
            train(model, optimizer, rank.rank, range(13, 20))
            if new > 1:
                assert rounds.hook.verify().identical
        return loaded, start, values(model)

    results = on_ranks(new, second)
    for loaded, start, end in results:
        for part in ("values", "outer"):
            torch.testing.assert_close(loaded[part], states[0][part], rtol=0, atol=0)
        assert torch.equal(start, torch.cat([states[0]["values"][name].flatten() for name in Net().state_dict()]))
        assert torch.equal(end, results[0][2])
        assert not torch.equal(end, start)
    for name in states[0]["exchange"]["residuals"]:
        kept = [state["exchange"]["residuals"][name] for state in (states[:1] if merged else states)]
        pending = [loaded["exchange"]["residuals"][name] for loaded, _, _ in results]
        torch.testing.assert_close(torch.stack(pending).sum(0), torch.stack(kept).sum(0), rtol=1e-4, atol=1e-6)
        assert torch.stack(kept).abs().max() > 0


def test_checkpoints_of_different_steps_are_refused():
    def run(rank, group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rounds = LocalSGD(model, optimizer, sync_every=3, process_group=group)
        state = rounds.state_dict()
        rounds.load_state_dict(sealed({**state, "steps": rank.rank}))
        with pytest.raises(RegisterError, match="same step of a checkpoint, got rank 0 '0', rank 1 '1'"), rounds:
            pass

    on_ranks(2, run)
