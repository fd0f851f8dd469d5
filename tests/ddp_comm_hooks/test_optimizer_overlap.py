"""The drop-in optimizer-overlap hooks: against ordinary training, and each bug of torch's as a test."""

import inspect

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as torchs

from gradwire import ddp_comm_hooks
from gradwire.ddp_comm_hooks import optimizer_overlap_hooks as ours
from gradwire.testing import spawn_ranks

from . import optimizer_overlap_workers as workers

ON_TWO = ["hooks", "optimizers", "some_parameters", "odd", "unused", "in_backward", "in_backward_for_some", "refused"]
ON_FOUR = ["sub_groups", "unused", "in_backward"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "names"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.thorough)])
def test_ranks(size, names):
    assert spawn_ranks(size, workers.run, names, timeout_s=250) == [None] * size


def test_optimizer_without_step_param():
    with pytest.raises(ValueError, match=r"SGD.* must implement method step_param"):
        ours._OptimizerHookState(torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize("name", ["_OptimizerHookState", "_hook_then_optimizer", "_apply_optim_in_backward_hook"])
def test_same_parameters(name):
    mine, theirs = (list(inspect.signature(getattr(side, name)).parameters) for side in (ours, torchs))
    assert mine == theirs


def test_names():
    assert ddp_comm_hooks.optimizer_overlap is ours
    state = ours._OptimInBackwardHookState(optim_stream=None, wait_for_optim_stream_enqueued=False)
    assert not state.wait_for_optim_stream_enqueued
    hook = ours._apply_optim_in_backward_hook(gradient_is_bucket_view=True)
    assert hook.__name__ == "apply_optim_in_backward_hook"
    assert hook.__qualname__.endswith("apply_optim_in_backward_hook")
