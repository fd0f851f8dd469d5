"""torch.compile around and inside DDP. It refuses bucket caps below DDP's first bucket, 1 MB."""

from __future__ import annotations

import torch

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.trial import Trial


@on_ranks(2, specs=("exact", "fp16", "int8", "int4:exempt=none"))
def test_compiled_module_in_ddp(ranks: Ranks) -> None:
    torch.compiler.reset()
    module = seeded(models.Deep, 2, 512)
    model = ranks.wrap(torch.compile(module, backend="eager"), bucket_cap_mb=1)
    trial = Trial(ranks, module, model=model)
    for step in range(3):
        trial.step(batch(ranks.rank, step, 512))
    assert trial.hook.verify().steps == 3
    assert len(trial.hook.layouts) >= 2


@on_ranks(2, specs=("exact", "fp16", "int8", "int4:exempt=none"))
def test_compiled_ddp(ranks: Ranks) -> None:
    """torch cuts the graph at DDP's bucket borders."""
    torch.compiler.reset()
    trial = Trial(ranks, seeded(models.Deep, 2, 512), bucket_cap_mb=1)
    trial.forward = torch.compile(trial.model, backend="aot_eager")
    for step in range(3):
        trial.step(batch(ranks.rank, step, 512))
    assert trial.hook.verify().steps == 3
    assert len(trial.hook.layouts) >= 2
