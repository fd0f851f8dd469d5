"""States of every version of the format load, and mean what they meant. See tests/kit/golden.py."""

from __future__ import annotations

from typing import Any

import torch

from ..kit import golden
from ..kit.ranks import Ranks, on_ranks


@on_ranks(2, specs=tuple(golden.STATEFUL))
def test_old_states_load(ranks: Ranks) -> None:
    versions = [version for version in (1, 2) if golden.path(ranks.spec, version).exists()]
    assert versions == ([2] if ranks.spec == "powersgd_one" else [1, 2])  # it is younger than the format
    for version in versions:
        file = torch.load(golden.path(ranks.spec, version), weights_only=True)
        for given in (file["ranks"][ranks.rank], file["ranks"], file["merged"]):
            kept = golden.STATEFUL[ranks.spec](ranks)
            kept.subject.load_state_dict(given)
            merged = kept.subject.state_dict(merged=True)
            kept.close()
            assert_same(without_marks(merged), without_marks(file["merged"]))


def without_marks(state: dict[str, Any]) -> dict[str, Any]:
    """What a state says about training, in any format, apart from what each rank has of its own."""
    marks = ("version", "checksum", "sent_at", "last_sent", "at_start")
    kept = {key: value for key, value in state.items() if key not in marks}
    transfers = [without_marks(transfer) for transfer in kept.pop("transfers", [])]
    return {"transfers": transfers} | {
        key: without_marks(value) if isinstance(value, dict) else value for key, value in kept.items()
    }


def assert_same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for pair in zip(got, wanted, strict=True):
            assert_same(*pair)
    else:
        assert got == wanted
