"""Post-local SGD: the hook, alone and with averaging of parameters, against torch's."""

import inspect

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs

from gradwire.ddp_comm_hooks import post_localSGD_hook as ours
from gradwire.testing import spawn_ranks

from . import post_local_sgd_workers as workers


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["twenty_steps", "levels_of_a_sub_group", "machines", "pickled", "resumes", "refuses"]),
        pytest.param(
            4,
            ["twenty_steps", "hierarchy", "levels_of_a_sub_group", "machines", "resumes"],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_ranks(size, names):
    assert spawn_ranks(size, workers.run, names, timeout_s=100) == [None] * size


@pytest.mark.parametrize("name", ["PostLocalSGDState", "post_localSGD_hook"])
def test_same_parameters_as_torchs(name):
    mine, theirs = (list(inspect.signature(getattr(side, name)).parameters) for side in (ours, torchs))
    assert mine == theirs
