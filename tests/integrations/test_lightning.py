"""The callback in Lightning's Trainer and Fabric, on 2 CPU ranks."""

from __future__ import annotations

import csv
import importlib
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard

from gradwire.integrations import lightning as ours

from ..kit.ranks import Ranks, on_ranks
from ..kit.versions import sharded_models
from .kit import SPECS, bits, check_installed, data, launched, loss_of, net, same

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    check_installed()


def module_of(package: Any, seed: int, sharded: bool) -> Any:
    class Student(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(seed)

        def training_step(self, batch: Any) -> Any:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        if sharded:

            def configure_model(self) -> None:
                for layer in (self.net[0], self.net[2]):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    return Student()


def fit(ranks: Ranks, *callbacks: Any, seed: int = 0, package: Any = None, resume: Any = None, **options: Any) -> Any:
    """Two epochs of three steps, with a checkpoint after the first; the trained module."""
    package = package or importlib.import_module("lightning.pytorch")
    saves = package.callbacks.ModelCheckpoint(dirpath=ranks.folder, filename="{step}", save_top_k=-1)
    settings = {"accelerator": "cpu", "devices": ranks.size, "strategy": "ddp", "max_epochs": 2, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    trainer = package.Trainer(**{**settings, **quiet, **options}, callbacks=[*callbacks, saves])
    module = module_of(package, seed, "ModelParallel" in type(trainer.strategy).__name__)
    trainer.fit(module, data(3, ranks.size), ckpt_path=resume)
    return module


@on_ranks(2, specs=SPECS)
def test_resuming_equals_the_uninterrupted_training(ranks: Ranks) -> None:
    with launched(ranks):
        first = ours.Gradwire(ranks.spec)
        whole = fit(ranks, first)
        assert first.hook.fired == 6
        assert first.hook.verify().hook == str(ranks.exchange)

        second = ours.Gradwire(ranks.spec)
        resumed = fit(ranks, second, seed=1, resume=ranks.folder / "step=3.ckpt")
        assert (second.hook.steps, second.hook.fired) == (6, 3)
        assert same(bits(whole), bits(resumed))
        second.hook.verify()


@on_ranks(2)
def test_the_other_package_and_the_logger(ranks: Ranks) -> None:
    import pytorch_lightning

    with launched(ranks):
        callback = ours.Gradwire("int8")
        logger = pytorch_lightning.loggers.CSVLogger(ranks.folder, name="logs", version=0)
        fit(ranks, callback, package=pytorch_lightning, logger=logger)
        callback.hook.verify()
        if ranks.rank == 0:
            rows = list(csv.DictReader((ranks.folder / "logs" / "version_0" / "metrics.csv").open()))
            assert len(rows) == 6
            assert float(rows[-1]["gradwire/sent_bytes"]) == callback.hook.stats().sent_bytes > 0
            assert all(float(row["gradwire/wait_s"]) >= 0 for row in rows)


@on_ranks(2)
def test_a_second_fit_registers_on_its_new_model(ranks: Ranks) -> None:
    with launched(ranks):
        callback = ours.Gradwire("int8")
        fit(ranks, callback)
        first = callback.hook
        fit(ranks, callback)
        assert first.closed
        assert callback.hook.fired == 6


@on_ranks(2)
def test_merged_state(ranks: Ranks) -> None:
    with launched(ranks):
        fit(ranks, ours.Gradwire(SPECS[1], merge_state=True))
        saved = torch.load(ranks.folder / "step=3.ckpt", weights_only=True)["callbacks"]["Gradwire"]["states"]
        assert [state["rank"] for state in saved] == [-1]
        callback = ours.Gradwire(SPECS[1])
        fit(ranks, callback, resume=ranks.folder / "step=3.ckpt")
        assert callback.hook.steps == 6


@sharded_models
@on_ranks(2, specs=("int8", "int8:feedback=true"))
def test_fsdp2(ranks: Ranks) -> None:
    """ModelParallelStrategy restores callbacks after the model was set up, unlike DDPStrategy."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    finals = []
    with launched(ranks):
        for resume in (None, ranks.folder / "step=3.ckpt"):
            callback = ours.Gradwire(ranks.spec, gather="bf16")
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
            trained = fit(ranks, callback, seed=len(finals), resume=resume, strategy=strategy)
            assert callback.hook.steps == 6
            callback.hook.verify()
            finals.append([param.full_tensor() for param in bits(trained)])
    assert same(*finals)


@on_ranks(2, specs=SPECS)
def test_fabric(ranks: Ranks) -> None:
    from lightning.fabric import Fabric

    def run(seed: int, steps: range, path: Any, resume: bool) -> Any:
        callback = ours.Gradwire(ranks.spec)
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback])
        fabric.launch()
        plain = net(seed)
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "gradwire": callback}
        batches = list(fabric.setup_dataloaders(data(6, ranks.size)))
        if resume:
            fabric.load(path, state)
        for step in steps:
            if step == 3 and not resume:
                fabric.save(path, state)
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batches[step]))
            optimizer.step()
        assert callback.hook.steps == 6
        callback.hook.verify()
        with pytest.raises(ours.RegisterError, match="one Gradwire callback serves one model"):
            fabric.setup(net(2))
        return bits(model)

    with launched(ranks):
        path = ranks.folder / "fabric.ckpt"
        assert same(run(0, range(6), path, False), run(1, range(3, 6), path, True))


@on_ranks(2)
def test_functions_of_ddp_comm_hooks_where_lightning_registers(ranks: Ranks) -> None:
    """Lightning registers `ddp_comm_hook` on CUDA only, so this strategy says that its device is one."""
    from lightning.pytorch.strategies import DDPStrategy

    from gradwire._torch.ddp import comm_hook_of
    from gradwire.ddp_comm_hooks import default_hooks, powerSGD_hook

    class OnCuda(DDPStrategy):
        hooked: Any = None

        @property
        def root_device(self) -> Any:
            cuda = self.hooked == "now"
            return type("Device", (), {"type": "cuda"}) if cuda else super().root_device

        def _register_ddp_hooks(self) -> None:
            self.hooked = "now"
            super()._register_ddp_hooks()
            self.hooked = comm_hook_of(self.model)

    low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    for state, hook, wrapper in (
        (None, default_hooks.fp16_compress_hook, None),
        (None, default_hooks.bf16_compress_hook, None),
        (low_rank, powerSGD_hook.powerSGD_hook, default_hooks.fp16_compress_wrapper),
    ):
        with launched(ranks):
            strategy = OnCuda(ddp_comm_state=state, ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)
            trained = fit(ranks, strategy=strategy)
            assert strategy.hooked[0].__name__ == (wrapper(hook) if wrapper else hook).__name__
            mine = torch.cat([param.flatten() for param in bits(trained)])
            others = ranks.sum_(mine.clone()) - mine
            assert torch.equal(mine, others), "the replicas differ"
            assert not same(bits(trained), bits(net(0)))


class Registers(ours.Callback):
    """A callback of the user that registers a hook of its own."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.model.register_comm_hook(None, allreduce_hook)


@on_ranks(2)
def test_what_cannot_carry_a_hook_is_refused_when_training_begins(ranks: Ranks) -> None:
    import lightning.pytorch as package
    from lightning.fabric import Fabric
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from gradwire.ddp_comm_hooks.default_hooks import fp16_compress_hook

    with launched(ranks):
        with pytest.raises(RuntimeError, match="more than one stateful callback of type `Gradwire`"):
            package.Trainer(accelerator="cpu", logger=False, callbacks=[ours.Gradwire("int8"), ours.Gradwire("int4")])
        with pytest.raises(ours.RegisterError, match=r"ddp_comm_hook=\.\.\.\) is set"):
            fit(ranks, ours.Gradwire("int8"), strategy=DDPStrategy(ddp_comm_hook=fp16_compress_hook))
        with pytest.raises(ours.RegisterError, match="Lightning has made a Student, and gradwire needs"):
            fit(ranks, ours.Gradwire("int8"), strategy=SingleDeviceStrategy("cpu"), devices=1)
        fabric = Fabric(
            accelerator="cpu", devices=2, strategy="ddp", callbacks=[ours.Gradwire("int8"), ours.Gradwire("int8")]
        )
        fabric.launch()
        with pytest.raises(ours.RegisterError, match="already has the gradwire hook 'int8'"):
            fabric.setup(net(0))
        with pytest.raises(ours.RegisterError, match="already has the hook 'allreduce_hook'"):
            fit(ranks, Registers(), ours.Gradwire("int8"))


@on_ranks(1)
def test_one_process_is_refused(ranks: Ranks) -> None:
    with launched(ranks), pytest.raises(ours.RegisterError, match="Lightning runs one process"):
        fit(ranks, ours.Gradwire("int8"), devices=1)
