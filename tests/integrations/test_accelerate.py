"""`prepare` with Accelerate's DDP and FSDP2, on 2 CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gradwire.errors import RegisterError
from gradwire.integrations import accelerate as ours
from gradwire.integrations import metrics

from ..kit.ranks import Ranks, on_ranks
from ..kit.versions import sharded_models
from .kit import SPECS, bits, check_installed, data, launched, loss_of, net, same

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    check_installed()


@contextmanager
def accelerator(ranks: Ranks, fsdp: bool = False, **options: Any) -> Iterator[Any]:
    """A new one. Accelerate keeps its state for the whole process, and switches FSDP on for accelerators only."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    with launched(ranks):
        if fsdp:
            wrap = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100, "cpu_ram_efficient_loading": False}
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
        made = Accelerator(cpu=True, **options)
        if fsdp:
            PartialState().distributed_type = made.state.distributed_type = DistributedType.FSDP
            made.state.fsdp_plugin = options["fsdp_plugin"]
        try:
            yield made
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def train(ranks: Ranks, acc: Any, resume: bool, **options: Any) -> Any:
    """Six batches, with a checkpoint after four or from there; the model and the hook."""
    plain = net(int(resume))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer, loader, hook = ours.prepare(
        acc, plain, optimizer, data(6, ranks.size), hook=ranks.spec, **options
    )
    if resume:
        acc.load_state(ranks.folder)
        assert hook.steps == 4 // acc.gradient_accumulation_steps
    for step, batch in enumerate(loader):
        if step == 4 and not resume:
            acc.save_state(ranks.folder)
        if step < 4 and resume:
            continue
        with acc.accumulate(model):
            acc.backward(loss_of(model, batch))
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model, hook


@on_ranks(2, specs=SPECS)
def test_resuming_equals_the_uninterrupted_training_with_accumulated_gradients(ranks: Ranks) -> None:
    with accelerator(ranks, gradient_accumulation_steps=2) as acc:
        whole, hook = train(ranks, acc, resume=False)
        assert hook.fired == 3
        hook.verify()
        assert metrics(hook)["gradwire/sent_bytes"] > 0
    with accelerator(ranks, gradient_accumulation_steps=2) as acc:
        resumed, hook = train(ranks, acc, resume=True)
        assert (hook.steps, hook.fired) == (3, 1)
        hook.verify()
    assert same(bits(whole), bits(resumed))


@sharded_models
@on_ranks(2, specs=("int8", "int8:feedback=true"))
def test_fsdp2(ranks: Ranks) -> None:
    finals = []
    for resume in (False, True):
        with accelerator(ranks, fsdp=True) as acc:
            model, hook = train(ranks, acc, resume, gather="bf16")
            assert (hook.steps, str(hook.gathers)) == (6, "bf16")
            hook.verify()
            finals.append([param.full_tensor() for param in bits(model)])
    assert same(*finals)


@on_ranks(2)
def test_what_cannot_carry_a_hook_is_refused(ranks: Ranks) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType

    with accelerator(ranks) as acc:
        with pytest.raises(RegisterError, match="exactly one model, got 0"):
            ours.prepare(acc, data(1, 2), hook="int8")
        with pytest.raises(RegisterError, match="exactly one model, got 2"):
            ours.prepare(acc, net(0), net(1), hook="int8")
        model, _ = ours.prepare(acc, net(0), hook="int8")
        with pytest.raises(RegisterError, match="already has the gradwire hook 'int8'"):
            ours.prepare(acc, model, hook="int8")
        PartialState().distributed_type = acc.state.distributed_type = DistributedType.NO
        with pytest.raises(RegisterError, match="Accelerate has made a Sequential, and gradwire needs"):
            ours.prepare(acc, net(0), hook="int8")
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    registered = pytest.raises(RegisterError, match="already has the hook 'fp16_compress_hook'")
    with accelerator(ranks, kwargs_handlers=[handler]) as acc, registered:
        ours.prepare(acc, net(0), hook="int8")


@on_ranks(1)
def test_one_process_is_refused(ranks: Ranks) -> None:
    with accelerator(ranks) as acc, pytest.raises(RegisterError, match="Accelerate runs one process"):
        ours.prepare(acc, net(0), hook="int8")
