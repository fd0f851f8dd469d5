"""Fingerprints find every single flipped bit, and states know whether they are still what was saved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire import StateError
from gradwire.engine.fingerprint import WIDTH, check_seal, fingerprint, sealed

SIZES = (1, 3, 7, 1000, 2 * WIDTH - 1, 2 * WIDTH, 2 * WIDTH + 1, 5 * WIDTH + 13)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8)


def tensor(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)


@settings(deadline=None)
@given(st.sampled_from(SIZES), st.sampled_from(DTYPES), st.integers(0, 2**40))
def test_every_flipped_bit_is_seen(size: int, dtype: torch.dtype, which: int) -> None:
    values = tensor(size, dtype)
    before, octets = int(fingerprint(values)), values.view(torch.uint8)
    place = which // 8 % octets.numel()
    octets[place] ^= 1 << which % 8
    assert int(fingerprint(values)) != before


@pytest.mark.parametrize("size", SIZES[2:])
def test_the_order_matters(size: int) -> None:
    values = tensor(size)
    prints = {int(fingerprint(values.roll(by))) for by in range(7)}
    assert len(prints) == 7


@pytest.mark.parametrize("size", SIZES)
def test_a_view_has_the_fingerprint_of_its_copy(size: int) -> None:
    base = tensor(2 * size + 1)
    for view in (base[1 : size + 1], base[: 2 * size : 2]):
        assert int(fingerprint(view)) == int(fingerprint(view.clone()))


STATE = {"step": 3, "name": "int8", "kept": {"a": torch.arange(4.0), "b": torch.zeros(0)}, "list": [1, None, 0.5]}


def test_a_sealed_state_is_accepted_in_any_order_of_its_keys() -> None:
    check_seal(dict(reversed(sealed(STATE).items())))


@pytest.mark.parametrize(
    "change",
    [
        {"step": 4},
        {"step": 3.0},
        {"step": True},
        {"name": "int4"},
        {"more": 1},
        {"kept": {"a": torch.arange(4.0)}},
        {"kept": {**STATE["kept"], "a": torch.arange(4.0).view(2, 2)}},
        {"kept": {**STATE["kept"], "a": torch.arange(4.0).double()}},
        {"kept": {**STATE["kept"], "a": torch.tensor([0.0, 1.0, 2.0, 3.0000002])}},
        {"list": [1, None]},
        {"list": [1, None, {1, 2}]},
    ],
    ids=str,
)
def test_a_changed_state_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(StateError, match="damaged"):
        check_seal({**sealed(STATE), **change})
