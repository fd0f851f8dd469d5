"""The drop-in quantization hooks: each bug of torch's (numbers of the inventory in the workers), as a test."""

import pytest

from gradwire.ddp_comm_hooks.quantization_hooks import quantization_perchannel_hook
from gradwire.errors import SpecError
from gradwire.testing import spawn_ranks

from . import quantization_workers as workers

NAMES = [
    "bucket_sizes",
    "many_buckets",
    "then_optimizer",
    "small_values",
    "outliers",
    "non_finite",
    "dtypes",
    "by_type",
    "wrapped",
    "wire",
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_ranks(size):
    assert spawn_ranks(size, workers.run, NAMES, timeout_s=150) == [None] * size


@pytest.mark.parametrize("wrong", [0, -512, 512.0, "512", None, True])
def test_wrong_bucket_size(wrong):
    """Said before anything else happens."""
    with pytest.raises(SpecError, match=r"bucket_size, .* must be a whole number of at least 1, got"):
        quantization_perchannel_hook(None, None, wrong)
