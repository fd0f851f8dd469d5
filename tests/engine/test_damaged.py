"""Damaged checkpoints: whatever has happened to the bytes, a state loads as it was saved, or is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import StateError
from gradwire.engine import checkpoint
from gradwire.engine.fingerprint import check_seal

from ..kit import golden
from .test_golden import assert_same

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.just([]),
    st.just({}), st.builds(torch.zeros, st.integers(0, 3)),
)  # fmt: skip


def saved(name: str) -> dict[str, Any]:
    return torch.load(golden.path(name, checkpoint.VERSION), weights_only=True)  # type: ignore[no-any-return]


def places(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a state."""
    if not isinstance(state, dict):
        return [path]
    return [path] * bool(path) + [place for key in state for place in places(state[key], (*path, key))]


def changed(state: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    inner = state
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return state


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_state_with_another_value_anywhere_is_refused(data: st.DataObject) -> None:
    state = saved(data.draw(st.sampled_from(["int4", "topk", "powersgd"])))["ranks"][0]
    place, value = data.draw(st.sampled_from(places(state))), data.draw(VALUES)
    broken = changed(state, place, value)
    try:
        step, residuals = checkpoint.unpack([broken], 0, golden.RANKS)
    except StateError:
        return
    assert_same({"step": step, "residuals": residuals}, {key: state[key] for key in ("step", "residuals")})


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_file_with_a_flipped_bit_or_a_lost_end_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(golden.STATEFUL)))
    original, octets = saved(name), bytearray(golden.path(name, checkpoint.VERSION).read_bytes())
    if data.draw(st.booleans()):
        octets[data.draw(st.integers(0, len(octets) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        octets = octets[: data.draw(st.integers(0, len(octets) - 1))]
    try:
        loaded = torch.load(io.BytesIO(bytes(octets)), weights_only=True)
        for state in (*loaded["ranks"], loaded["merged"]):
            checkpoint.check_version("this", state, set())
            check_seal(state)
    except Exception:  # torch has many errors for files that are not its own
        return
    assert_same(loaded, original)


@pytest.mark.parametrize(
    "foreign", [None, 3, "text", [], [3], {}, {"version": 2}, {"version": 99}, torch.zeros(3)], ids=str
)
def test_what_is_no_state_is_refused(foreign: Any) -> None:
    states = foreign if isinstance(foreign, list) else [foreign]
    with pytest.raises(StateError):
        checkpoint.unpack(states, 0, 2)
