"""The drop-in PowerSGD hooks: each bug of torch's (numbers of the inventory in the workers), as a test."""

import io

import pytest
import torch

from gradwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.errors import SpecError
from gradwire.testing import spawn_ranks

from . import power_sgd_workers as workers

NAMES = [
    "both_forms_train",
    "many_tiny_buckets",
    "unused_parameters",
    "odd_parameters",
    "wrapped",
    "two_models",
    "last_bucket_unused",
    "stats",
    "checkpoint",
    "own_group",
    "a_step_of_ones_choice",
    "one_file_for_all",
    "by_type",
    "sub_group",
    "compiled_is_refused",
    "small_model_warns",
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks(size):
    assert spawn_ranks(size, workers.run, NAMES, timeout_s=240) == [None] * size


@pytest.mark.parametrize("start", [-1, 0, 1])
@pytest.mark.parametrize(("feedback", "warm"), [(True, True), (True, False), (False, True)])
def test_too_early_a_start_is_refused_as_torch_does(start, feedback, warm):
    with pytest.raises(ValueError, match="Expect `start_powerSGD_iter` > 1"):
        PowerSGDState(None, 1, start, use_error_feedback=feedback, warm_start=warm)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"matrix_approximation_rank": 0}, "rank must be at least 1"),
        ({"min_compression_rate": 0}, "min_compression must be above 0"),
        ({"orthogonalization_epsilon": -1}, "must not be negative"),
        ({"start_powerSGD_iter": -1, "use_error_feedback": False, "warm_start": False}, "warmup must be at least 0"),
    ],
)
def test_bad_settings(settings, said):
    with pytest.raises(ValueError, match=said):
        PowerSGDState(None, **settings)


def test_the_state_must_be_a_state():
    with pytest.raises(SpecError, match="needs a PowerSGDState as its state, got NoneType"):
        powerSGD_hook(None, None)


def test_a_fresh_state_goes_through_a_file_without_a_process_group():
    state = PowerSGDState(None, 3, 17, 1.5, random_seed=5, compression_stats_logging_frequency=0)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file)
    assert (again.matrix_approximation_rank, again.start_powerSGD_iter, again.min_compression_rate) == (3, 17, 1.5)
    assert (again.random_seed, again.iter, again.process_group) == (5, 0, None)
    assert again.compression_stats_logging_frequency == 1
    assert again.compression_stats() == (0, 0, 0)
