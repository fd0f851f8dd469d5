"""The drop-in mixed-precision hook, inside DDP's own mixed precision as far as a CPU can run it."""

import dataclasses
import inspect

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks as torchs

from gradwire.ddp_comm_hooks import mixed_precision_hooks as ours
from gradwire.testing import spawn_ranks

from . import mixed_precision_workers as workers


@pytest.mark.timeout(200)
def test_ranks():
    names = ["training", "large_values", "frozen", "without_streams"]
    assert spawn_ranks(2, workers.run, names, timeout_s=150) == [None] * 2


def test_same_names_and_parameters():
    mine, theirs = (dataclasses.fields(side._AllreduceUpcastHookState) for side in (ours, torchs))
    assert [(field.name, field.default) for field in mine] == [(field.name, field.default) for field in theirs]
    hooks = [side._reducer_allreduce_and_upcast_hook for side in (ours, torchs)]
    assert list(inspect.signature(hooks[0]).parameters) == list(inspect.signature(hooks[1]).parameters)
