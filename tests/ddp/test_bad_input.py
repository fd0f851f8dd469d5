"""Bad input: a clear error that names what is allowed, when it is given and not at step 1."""

from __future__ import annotations

import pytest
import torch

import gradwire

from .conftest import Case, Outcome
from .runner import cases

pytestmark = pytest.mark.timeout(450)


@pytest.mark.parametrize("ddp_case", cases("bad"))
def test_bad_input(ddp_case: Case, outcome: Outcome) -> None:
    outcome(ddp_case)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_a_bucket_of_whole_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"floating or complex type, got {dtype}"):
        gradwire.make_bucket([torch.zeros(3), torch.zeros(4).to(dtype)])


def test_an_empty_bucket() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        gradwire.make_bucket([])
