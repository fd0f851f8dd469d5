"""The samples of docs/integrations.md as they stand, on 2 CPU ranks. Only that for Ray Train is not run here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire

from ..kit.ranks import Ranks, on_ranks
from .kit import check_installed, data, launched, net
from .test_accelerate import accelerator
from .test_lightning import module_of
from .test_transformers import gpt, trainer

pytestmark = pytest.mark.integrations

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    check_installed()


def run_sample(word: str, **names: Any) -> dict[str, Any]:
    """Run the only sample with this word, and return what it has defined."""
    samples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (sample,) = (each for each in samples if word in each)
    exec(compile(sample, f"{PAGE.name}:\n{sample}", "exec"), names := {"gradwire": gradwire, **names})
    return names


@on_ranks(2)
def test_lightning(ranks: Ranks) -> None:
    import lightning.pytorch

    module = module_of(lightning.pytorch, 0, sharded=False)
    module.on_train_batch_end = lambda *_: setattr(module.trainer, "should_stop", True)  # after the first epoch
    os.chdir(ranks.folder)  # where it writes its logs and checkpoints
    with launched(ranks):
        found = run_sample("trainer.fit(", module=module, data=data(2, ranks.size))
        (callback,) = (each for each in found["trainer"].callbacks if hasattr(each, "hook"))
        assert callback.hook.fired > 0
        callback.hook.verify()


@on_ranks(2)
def test_fabric(ranks: Ranks) -> None:
    from lightning.fabric import Fabric

    os.chdir(ranks.folder)
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    with launched(ranks):
        found = run_sample("fabric.setup(", Fabric=Fabric, model=model, optimizer=optimizer, step=0)
        assert str(found["callback"].hook.exchange) == "int8"
        assert Path("last.ckpt").exists()


@on_ranks(2)
def test_accelerate(ranks: Ranks) -> None:
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    with accelerator(ranks) as acc:
        given = {"accelerator": acc, "model": model, "optimizer": optimizer, "data": data(1, ranks.size)}
        assert str(run_sample("accelerate.prepare(", **given)["hook"].exchange) == "int8"


@on_ranks(2)
def test_trainer(ranks: Ranks) -> None:
    model, rows = gpt(0)
    with trainer(ranks, model, rows, [], max_steps=1, save_strategy="no") as other:
        found = run_sample("trainer.train()", model=model, settings=other.args, data=rows)
        (callback,) = (each for each in found["trainer"].callback_handler.callbacks if hasattr(each, "hook"))
        assert callback.hook.fired == 1
        callback.hook.verify()
