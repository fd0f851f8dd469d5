"""What register() must refuse, by name, before the first step."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire import RegisterError, SpecError

from . import models
from .failures import Failing
from .kit import UNEVEN, Ranks, check
from .models import batch, seeded
from .trial import Trial, raised, train

ONE = ("exact",)


def refusal(ranks: Ranks, spec: object = "exact", kind: type[Exception] = SpecError, **options: object) -> str:
    """What register() says; and the model can still be registered properly."""
    module = seeded(models.Deep, 2)
    model = ranks.wrap(module)
    text = raised(kind, lambda: gradwire.register(model, spec, **options))
    Trial(ranks, module, model=model).step(batch(ranks.rank, 0))
    return text


@check(sizes=(1, 2), specs=ONE)
def unknown_name(ranks: Ranks) -> None:
    text = refusal(ranks, "pf16")
    assert "Did you mean 'fp16'?" in text
    for known in gradwire.exchanges.EXCHANGES:
        assert known in text


@check(sizes=(1, 2), specs=ONE)
def unknown_option(ranks: Ranks) -> None:
    text = refusal(ranks, "fp16:accumulat=wire")
    assert "Did you mean 'accumulate'?" in text
    assert "feedback" in text
    assert "'rank'" in refusal(ranks, "fp16", rank=2)
    assert "'rank'" in refusal(ranks, "exact:rank=2")


@check(sizes=(1, 2), specs=ONE)
def wrong_value(ranks: Ranks) -> None:
    text = refusal(ranks, "fp16:accumulate=fp64")
    assert "fp32" in text
    assert "wire" in text
    assert "'fp64'" in text
    assert "true or false" in refusal(ranks, "fp16:feedback=yes")
    assert "true or false" in refusal(ranks, "fp16", feedback=1)
    assert "one, two" in refusal(ranks, "bf16", shots=1)
    assert "accumulate=wire" in refusal(ranks, "bf16:accumulate=wire,feedback=true")


@check(sizes=(1, 2), specs=ONE)
def no_spec_at_all(ranks: Ranks) -> None:
    for spec in ("", ":", ":accumulate=wire", "fp16:accumulate", "fp16:accumulate=", "fp16:shots=one,shots=two"):
        assert "spec" in refusal(ranks, spec), spec
    for other in (None, 16, torch.float16, {"name": "fp16"}, object()):
        assert type(other).__name__ in refusal(ranks, other)


@check(sizes=(1, 2), specs=ONE)
def options_beside_an_object(ranks: Ranks) -> None:
    assert "feedback" in refusal(ranks, gradwire.exchange("fp16"), feedback=True)


@check(sizes=(1, 2), specs=ONE)
def chunk_bytes(ranks: Ranks) -> None:
    for wrong in (0, -1, 1023, 2.5e6, "2 MB", True):
        text = refusal(ranks, "fp16", chunk_bytes=wrong)
        assert "chunk_bytes" in text
        assert repr(wrong) in text


@check(sizes=(1, 2), specs=ONE)
def bucket_mb(ranks: Ranks) -> None:
    for wrong in (0, -1.0, float("nan"), float("inf"), "4", True):
        assert "finite number above 0" in refusal(ranks, "fp16", bucket_mb=wrong)


@check(sizes=(1, 2), specs=ONE)
def no_ddp_model(ranks: Ranks) -> None:
    for model in (nn.Linear(2, 2), None, "model", nn.DataParallel(nn.Linear(2, 2))):
        text = raised(RegisterError, lambda model=model: gradwire.register(model, "fp16"))
        assert "DistributedDataParallel" in text
        assert type(model).__name__ in text


@check(sizes=(1, 2), specs=ONE)
def registered_twice(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 2), register={"spec": "fp16"})
    text = raised(RegisterError, lambda: gradwire.register(trial.model, "bf16"))
    assert "'fp16'" in text
    assert "hook.switch('bf16')" in text
    text = raised(RegisterError, lambda: gradwire.register(trial.model, "auto"))
    assert "wrap the module in a new DistributedDataParallel" in text
    trial.step(batch(ranks.rank, 0))


@check(sizes=(1, 2), specs=ONE)
def a_hook_of_torch_is_there_already(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 2))
    model.register_comm_hook(ranks.group, allreduce_hook)
    text = raised(RegisterError, lambda: gradwire.register(model, "bf16"))
    assert "allreduce_hook" in text
    train(model, [batch(ranks.rank, 0)])


@check(sizes=(1, 2), specs=ONE)
def a_builtin_hook_is_there_already(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 2))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert "once" in raised(RegisterError, lambda: gradwire.register(model, "bf16"))
    train(model, [batch(ranks.rank, 0)])


@check(sizes=UNEVEN, specs=ONE)
def ranks_that_ask_for_different_hooks(ranks: Ranks) -> None:
    asked = "fp16" if ranks.rank == 0 else "bf16:shots=two"
    text = refusal(ranks, asked, RegisterError)
    assert "rank 0 'fp16'" in text
    assert "rank 1 'bf16:shots=two'" in text


@check(sizes=(2,), specs=ONE)
def auto_on_one_rank_only(ranks: Ranks) -> None:
    """It starts as `exact`, which the other one asks for."""
    text = refusal(ranks, "exact" if ranks.rank else "auto:max_error=0.5", RegisterError)
    assert "'auto:max_error=0.5'" in text


@check(sizes=UNEVEN, specs=ONE)
def ranks_that_ask_for_different_chunks(ranks: Ranks) -> None:
    """Other chunks are other collectives: without a word the ranks would wait for each other."""
    assert "chunk_bytes" in refusal(ranks, "fp16", RegisterError, chunk_bytes=1024 * (1 + ranks.rank))
    assert "bucket_mb" in refusal(ranks, "fp16", RegisterError, bucket_mb=1 + ranks.rank)


@check(sizes=(2,), specs=ONE)
def everything_is_frozen(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 2))
    model.requires_grad_(False)
    assert "parameter" in raised(RegisterError, lambda: gradwire.register(model, "fp16"))


@check(sizes=(2,), specs=ONE)
def a_group_that_cannot_move_cpu_tensors(ranks: Ranks) -> None:
    group = dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=10))
    model = DDP(seeded(models.Deep, 2), process_group=group, init_sync=False)
    text = raised(RegisterError, lambda: gradwire.register(model, "fp16"))
    assert "'cpu'" in text
    assert "gloo" in text


@check(sizes=(1, 2), specs=ONE)
def an_exchange_object_registers(ranks: Ranks) -> None:
    """So that the refusals above do not come from refusing everything."""
    model = ranks.wrap(seeded(models.Deep, 2))
    hook = ranks.register(model, Failing(rank=-1, at=0))
    train(model, [batch(ranks.rank, 0)])
    assert hook.steps == 1


@check(sizes=(1, 2), specs=ONE)
def zz_process_group_destroyed(ranks: Ranks) -> None:
    """Comes last: no check after it has a process group."""
    model = DDP(seeded(models.Deep, 2))
    dist.destroy_process_group()
    assert "init_process_group" in raised(RegisterError, lambda: gradwire.register(model, "fp16"))
