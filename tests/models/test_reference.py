"""What torch's own tests of its hooks ask for: gradients of a model whose forward depends on the rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kit.models import RankedTask, seeded
from ..kit.ranks import AVERAGING, Ranks, on_ranks
from ..kit.trial import raised


def gradient(ranks: Ranks, spec: str | None, **ddp: bool) -> Tensor:
    model = ranks.wrap(seeded(RankedTask), **ddp)
    if spec is not None:
        ranks.register(model, spec)
    rows = torch.randn(40, 20, generator=torch.Generator().manual_seed(2020))
    model(rows, ranks.rank).mean().backward()
    return model.module.p.grad


EIGHT_BITS = tuple(spec for spec in AVERAGING if not spec.startswith(("int2", "int4", "powersgd")))
"""torch has no hook of fewer, and asks for no more."""


@on_ranks(2, specs=EIGHT_BITS)
def test_gradients_are_as_close_as_torchs_tests_require(ranks: Ranks) -> None:
    """Gradients are about 1e-3 here, so an absolute 1e-4 has room for bf16's 8 bits too."""
    for bucket_view in (False, True):
        plain = gradient(ranks, None, gradient_as_bucket_view=bucket_view)
        hooked = gradient(ranks, ranks.spec, gradient_as_bucket_view=bucket_view)
        torch.testing.assert_close(hooked, plain, rtol=1e-5, atol=0 if ranks.spec == "exact" else 1e-4)


@on_ranks(2, thorough=(3,), specs=("noop",))
def test_noop_and_a_manual_all_reduce_equal_plain_ddp(ranks: Ranks) -> None:
    plain, local = gradient(ranks, None), gradient(ranks, "noop")
    raised(AssertionError, lambda: torch.testing.assert_close(local, plain))
    torch.testing.assert_close(ranks.sum_(local.clone()) / ranks.size, plain)
