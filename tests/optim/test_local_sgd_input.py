"""What local training refuses, and how it says so."""

import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import RegisterError, SpecError, StateError
from gradwire.optim import DiLoCo, LocalSGD

from ..kit.local import Net, on_ranks, train


def _another(**changes):
    def run(rank, group):
        settings = {"sync_every": 4, "fragments": 2, "delay": 1, **(changes if rank.rank == 1 else {})}
        model = settings.pop("model", Net)()
        with pytest.raises(RegisterError) as caught:
            DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group, **settings)
        return str(caught.value)

    return on_ranks(2, run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync_every": 5}, r"same local training, got rank 0 'DiLoCo\(sync_every=4.*rank 1 'DiLoCo\(sync_every=5"),
        ({"fragments": 3}, "fragments=2.*fragments=3"),
        ({"delay": 0}, "delay=1.*delay=0"),
        ({"outer_lr": 0.5}, r"outer_lr=0\.7.*outer_lr=0\.5"),
        ({"exchange": "bf16"}, "same hook, got rank 0 'exact', rank 1 'bf16'"),
        ({"model": lambda: nn.Linear(3, 4)}, "same model"),
    ],
)
def test_different_settings_on_ranks_are_refused(changes, message):
    for text in _another(**changes):
        assert re.search(message, text), text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_every": 0}, "sync_every must be a whole number of at least 1, got 0"),
        ({"sync_every": 2.5}, "sync_every must be a whole number"),
        ({"sync_every": 4, "fragments": 0}, "fragments must be a whole number of at least 1, got 0"),
        ({"sync_every": 2, "fragments": 3}, r"fragments must be at most sync_every \(2\)"),
        ({"sync_every": 4, "fragments": 4}, r"the parameters \(3\), got 4"),
        ({"sync_every": 4, "delay": 4}, r"delay must be a whole number from 0 to sync_every - 1 \(3\), got 4"),
        ({"sync_every": 4, "delay": -1}, "delay must be"),
        ({"sync_every": 4, "outer_lr": 0.0}, "outer_lr must be a finite number above 0"),
        ({"sync_every": 4, "outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\)"),
        ({"sync_every": 4, "exchange": "int99"}, "unknown hook 'int99'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    model = Net()
    with pytest.raises(SpecError, match=message):
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_bad_objects_are_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    for wrong, other, message in [
        (ddp, optimizer, "takes the plain module"),
        (model, None, "takes a torch.nn.Module and a torch.optim.Optimizer, got Net and NoneType"),
        (Net(), optimizer, "holds no parameter of the model"),
        (nn.ReLU(), optimizer, "nothing to average"),
        (model, optimizer, "there is no process group"),
    ]:
        with pytest.raises(RegisterError, match=message):
            LocalSGD(wrong, other, sync_every=2)


def test_bad_use_is_refused():
    def run(rank, group):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rounds = LocalSGD(model, optimizer, sync_every=3, delay=2, process_group=group)
        with pytest.raises(RegisterError, match="already trains under LocalSGD"):
            DiLoCo(model, optimizer, sync_every=3, process_group=group)
        with rounds:
            train(model, optimizer, 0, range(4))
            state = rounds.state_dict()
            with pytest.raises(RegisterError, match="before entering"):
                rounds.load_state_dict(state)
        with pytest.raises(RegisterError, match="entered once"), rounds:
            pass
        other = DiLoCo(model, optimizer, sync_every=3, process_group=group)  # the first is closed by now
        with pytest.raises(StateError, match="has no momentum"):
            other.load_state_dict(state)
        other.close()
        later = LocalSGD(model, optimizer, sync_every=4, process_group=group)
        with pytest.raises(StateError, match="averages in flight"):
            later.load_state_dict(state)
        with pytest.raises(StateError, match="not a state of local training"):
            later.load_state_dict({"version": 1})
        later.close()
        small = nn.Linear(2, 2)
        with pytest.raises(StateError, match=r"another model.*bias \(\(12,\), here \(2,\)\)"):
            LocalSGD(small, torch.optim.SGD(small.parameters()), sync_every=3, process_group=group).load_state_dict(
                state
            )

    on_ranks(2, run)
