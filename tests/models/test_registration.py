"""What register() refuses before the first step, with an error that says what is allowed."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire import RegisterError, SpecError

from ..kit import models
from ..kit.failing import Failing
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.trial import Trial, raised, train


def refusal(ranks: Ranks, spec: object = "exact", kind: type[Exception] = SpecError, **options: object) -> str:
    """What register() says; and the model can still be registered properly."""
    module = seeded(models.Deep, 2)
    model = ranks.wrap(module)
    text = raised(kind, lambda: gradwire.register(model, spec, **options))
    Trial(ranks, module, model=model, register={"spec": "exact"}).step(batch(ranks.rank, 0))
    return text


@on_ranks(1, 2)
def test_unknown_hook_is_refused(ranks: Ranks) -> None:
    text = refusal(ranks, "pf16")
    assert "Did you mean 'fp16'?" in text
    for known in gradwire.exchanges.EXCHANGES:
        assert known in text


@on_ranks(1, 2)
def test_unknown_option_is_refused(ranks: Ranks) -> None:
    text = refusal(ranks, "fp16:accumulat=wire")
    assert "Did you mean 'accumulate'?" in text
    assert "feedback" in text
    assert "'rank'" in refusal(ranks, "fp16", rank=2)
    assert "'rank'" in refusal(ranks, "exact:rank=2")


@on_ranks(1, 2)
def test_wrong_option_value_is_refused(ranks: Ranks) -> None:
    text = refusal(ranks, "fp16:accumulate=fp64")
    assert "fp32" in text
    assert "wire" in text
    assert "'fp64'" in text
    assert "true or false" in refusal(ranks, "fp16:feedback=yes")
    assert "true or false" in refusal(ranks, "fp16", feedback=1)
    assert "one, two" in refusal(ranks, "bf16", shots=1)
    assert "accumulate=wire" in refusal(ranks, "bf16:accumulate=wire,feedback=true")


@on_ranks(1, 2)
def test_invalid_spec_is_refused(ranks: Ranks) -> None:
    for spec in ("", ":", ":accumulate=wire"):
        assert "the spec has no name" in refusal(ranks, spec), spec
    for spec in ("fp16:accumulate", "fp16:accumulate="):
        assert "is not of the form option=value" in refusal(ranks, spec), spec
    assert "option 'shots' is given twice" in refusal(ranks, "fp16:shots=one,shots=two")
    for other in (None, 16, torch.float16, {"name": "fp16"}, object()):
        assert type(other).__name__ in refusal(ranks, other)


@on_ranks(1, 2)
def test_options_with_an_exchange_object_are_refused(ranks: Ranks) -> None:
    assert "feedback" in refusal(ranks, gradwire.exchange("fp16"), feedback=True)


@on_ranks(1, 2)
def test_invalid_chunk_bytes_is_refused(ranks: Ranks) -> None:
    for wrong in (0, -1, 1023, 2.5e6, "2 MB", True):
        text = refusal(ranks, "fp16", chunk_bytes=wrong)
        assert "chunk_bytes" in text
        assert repr(wrong) in text


@on_ranks(1, 2)
def test_invalid_bucket_mb_is_refused(ranks: Ranks) -> None:
    for wrong in (0, -1.0, float("nan"), float("inf"), "4", True):
        assert "finite number above 0" in refusal(ranks, "fp16", bucket_mb=wrong)


@on_ranks(1, 2)
def test_model_without_ddp_is_refused(ranks: Ranks) -> None:
    for model in (nn.Linear(2, 2), None, "model", nn.DataParallel(nn.Linear(2, 2))):
        text = raised(RegisterError, lambda model=model: gradwire.register(model, "fp16"))
        assert "DistributedDataParallel" in text
        assert type(model).__name__ in text


@on_ranks(1, 2)
def test_second_registration_is_refused(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 2), register={"spec": "fp16"})
    text = raised(RegisterError, lambda: gradwire.register(trial.model, "bf16"))
    assert "'fp16'" in text
    assert "hook.switch('bf16')" in text
    text = raised(RegisterError, lambda: gradwire.register(trial.model, "auto"))
    assert "wrap the module in a new DistributedDataParallel" in text
    trial.step(batch(ranks.rank, 0))


@on_ranks(1, 2)
def test_model_with_a_hook_of_torch_is_refused(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 2))
    model.register_comm_hook(ranks.group, allreduce_hook)
    text = raised(RegisterError, lambda: gradwire.register(model, "bf16"))
    assert "allreduce_hook" in text
    train(model, [batch(ranks.rank, 0)])


@on_ranks(1, 2)
def test_model_with_a_builtin_hook_is_refused(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 2))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert "once" in raised(RegisterError, lambda: gradwire.register(model, "bf16"))
    train(model, [batch(ranks.rank, 0)])


@on_ranks(2, thorough=(3,))
def test_different_hooks_on_ranks_are_refused(ranks: Ranks) -> None:
    spec = "fp16" if ranks.rank == 0 else "bf16:shots=two"
    text = refusal(ranks, spec, RegisterError)
    assert "rank 0 'fp16'" in text
    assert "rank 1 'bf16:shots=two'" in text


@on_ranks(2)
def test_auto_on_one_rank_only_is_refused(ranks: Ranks) -> None:
    """It starts as `exact`, which the other one asks for."""
    text = refusal(ranks, "exact" if ranks.rank else "auto:max_error=0.5", RegisterError)
    assert "'auto:max_error=0.5'" in text


@on_ranks(2, thorough=(3,))
def test_different_chunks_on_ranks_are_refused(ranks: Ranks) -> None:
    """Other chunks are other collectives: without the error this would be a deadlock."""
    assert "chunk_bytes" in refusal(ranks, "fp16", RegisterError, chunk_bytes=1024 * (1 + ranks.rank))
    assert "bucket_mb" in refusal(ranks, "fp16", RegisterError, bucket_mb=1 + ranks.rank)


@on_ranks(2)
def test_frozen_model_is_refused(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 2))
    model.requires_grad_(False)
    assert "parameter" in raised(RegisterError, lambda: gradwire.register(model, "fp16"))


@on_ranks(2)
def test_group_without_cpu_backend_is_refused(ranks: Ranks) -> None:
    group = dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=10))
    model = DDP(seeded(models.Deep, 2), process_group=group, init_sync=False)
    text = raised(RegisterError, lambda: gradwire.register(model, "fp16"))
    assert "'cpu'" in text
    assert "gloo" in text


@on_ranks(1, 2)
def test_exchange_object_is_accepted(ranks: Ranks) -> None:
    """So that the refusals above do not come from refusing everything."""
    model = ranks.wrap(seeded(models.Deep, 2))
    hook = ranks.register(model, Failing(rank=-1, at=0))
    train(model, [batch(ranks.rank, 0)])
    assert hook.steps == 1


@on_ranks(1, 2)
def test_destroyed_process_group_is_refused(ranks: Ranks) -> None:
    model = DDP(seeded(models.Deep, 2))
    dist.destroy_process_group()
    assert "init_process_group" in raised(RegisterError, lambda: gradwire.register(model, "fp16"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_bucket_of_whole_numbers_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"floating or complex type, got {dtype}"):
        gradwire.make_bucket([torch.zeros(3), torch.zeros(4).to(dtype)])


def test_empty_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        gradwire.make_bucket([])


class Named(nn.Module):
    """Two layers of the same shape, whose names and types each rank chooses."""

    def __init__(self, names: tuple[str, str], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4, dtype=dtype))


@on_ranks(2)
def test_different_models_on_ranks_are_refused(ranks: Ranks) -> None:
    """DDP compares shapes alone: with another order it would average the gradients of different parameters."""
    cases = {
        "parameter number 0": [("a", "b"), ("b", "a")],
        "got rank 0 'a.weight (4, 4) torch.float32', rank 1 'b.weight (4, 4) torch.float32'": [("a", "b"), ("b", "a")],
        "parameter number 2": [("a", "b"), ("a", "c")],
    }
    for text, names in cases.items():
        model = ranks.wrap(Named(names[ranks.rank]))
        assert text in raised(RegisterError, lambda model=model: ranks.register(model, "int8"))


@on_ranks(2)
def test_different_settings_of_ddp_on_ranks_are_refused(ranks: Ranks) -> None:
    model = ranks.wrap(Named(("a", "b")), find_unused_parameters=bool(ranks.rank))
    text = raised(RegisterError, lambda: ranks.register(model, "int8"))
    assert "same find_unused_parameters, got rank 0 'False', rank 1 'True'" in text
    model = ranks.wrap(Named(("a", "b")), bucket_cap_mb=1 + ranks.rank)
    text = raised(RegisterError, lambda: ranks.register(model, "int8"))
    assert "rank 0 'bucket_cap_mb=1, static_graph=False', rank 1 'bucket_cap_mb=2, static_graph=False'" in text


@on_ranks(2)
def test_different_versions_on_ranks_are_refused(ranks: Ranks) -> None:
    model = ranks.wrap(Named(("a", "b")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.engine.hook.__version__", f"9.{ranks.rank}")
        text = raised(RegisterError, lambda: ranks.register(model, "int8"))
    assert "same version, got rank 0 'gradwire 9.0, torch" in text
