"""The self-check on the test device: it passes, and it finds a wrong kernel and a missing order of streams."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.engine.stream import StreamRunner
from gradwire.kernels import torch as kernels
from gradwire.testing import device
from gradwire.tools.measure import selfcheck

from ..kit.ranks import Ranks
from .kit import following, on_device


def checked(ranks: Ranks, *hooks: str) -> dict[str, Any]:
    return selfcheck.run(ranks.rank, ranks.size, {"device": device.DEVICE, "hooks": list(hooks)}, lambda *_: None)


@on_device(2)
def test_everything_is_right_here(ranks: Ranks) -> None:
    result = checked(ranks, "exact", "int4:feedback=true")
    assert (result["failures"], result["passed"], result["backend"]) == ([], True, device.BACKEND)
    assert {fact["kernels"] for fact in result["facts"]} == {"torch"}
    plain, exact, int4 = result["rows"]
    assert plain["step_s"] > 0
    assert exact["wire_s"] > int4["wire_s"] > 0
    assert min(int4["encode_s"], int4["decode_s"], int4["wait_s"], int4["encode_copies"]) > 0


@on_device(2)
def test_a_wrong_kernel_is_found(ranks: Ranks) -> None:
    """Wrong on the device only, as a compiler's mistake would be."""
    right = kernels.int8.decode_

    def wrong(out: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = right(out, *rest)
        return result.mul_(1 + 2.0**-20) if out.device.type == device.DEVICE else result

    kernels.int8.decode_ = wrong
    try:
        result = checked(ranks, "int8")
    finally:
        kernels.int8.decode_ = right
    assert not result["passed"]
    assert any(text.startswith("int8, kernels: decode: ") for text in result["failures"])


@on_device(2)
def test_a_side_stream_that_does_not_wait_is_found(ranks: Ranks) -> None:
    right = StreamRunner._side_stream
    StreamRunner._side_stream = lambda self, result: torch.get_device_module(result.device).stream(self._stream)
    try:
        with following("eager_sides"):
            result = checked(ranks, "int8")
    finally:
        StreamRunner._side_stream = right
    assert any(text.startswith("int8, mean: ") for text in result["failures"])
