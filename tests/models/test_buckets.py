"""Buckets of another size than DDP made: every mode of DDP goes on as it was."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire import RegisterError
from gradwire.exchanges.base import DEFAULT_BUCKETS
from gradwire.models.buckets import SMALLEST_BYTES

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.trial import Trial, loss, raised, same_everywhere, train
from ..kit.versions import ddp_option

SOME = ("exact", "int8", "int2:feedback=true,exempt=none", "powersgd:rank=1,min_compression=0.5")
ONE = ("exact",)
SMALL = {"bucket_mb": 0.002}
WIDE = 1100
"""Layers of 4.8 MB, more than the smallest bucket."""


def small(ranks: Ranks, module: nn.Module, count: int = 3, **ddp: object) -> Trial:
    trial = Trial(ranks, module, register=SMALL, **ddp).steps(count)
    assert len(trial.hook.layouts) > 2
    return trial


@on_ranks(2, thorough=(3,), specs=SOME)
def test_smaller_buckets(ranks: Ranks) -> None:
    small(ranks, seeded(models.Deep, 6))


@on_ranks(2, specs=SOME)
def test_other_buckets_than_the_user_gave_ddp(ranks: Ranks) -> None:
    small(ranks, seeded(models.Deep, 6), bucket_cap_mb=1)
    large = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002, register={"bucket_mb": 1}).steps(3)
    assert len(large.hook.layouts) == 1


@ddp_option("bucket_cap_mb_list")
@on_ranks(2, specs=SOME)
def test_other_buckets_than_the_list_the_user_gave_ddp(ranks: Ranks) -> None:
    small(ranks, seeded(models.Deep, 6), bucket_cap_mb_list=[0.1, 0.2])


@on_ranks(2, specs=SOME)
def test_small_buckets_with_gradients_as_views(ranks: Ranks) -> None:
    trial = small(ranks, seeded(models.Deep, 6), gradient_as_bucket_view=True)
    trial.step(*(batch(ranks.rank, 10 + part) for part in range(2)))


@on_ranks(2, specs=SOME)
def test_small_buckets_with_unused_parameters(ranks: Ranks) -> None:
    module = seeded(models.Picky, 6)
    module.use = (0, 2) if ranks.rank else (0, 1)
    small(ranks, module, find_unused_parameters=True)


@on_ranks(2, specs=SOME)
def test_small_buckets_with_a_static_graph(ranks: Ranks) -> None:
    small(ranks, seeded(models.Reusing, 6), static_graph=True)
    small(ranks, seeded(models.Checkpointed, 6), static_graph=True)


@on_ranks(2, specs=SOME)
def test_small_buckets_with_ignored_and_frozen_parameters(ranks: Ranks) -> None:
    module = seeded(models.Deep, 6)
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.weight", "layers.1.bias"])
    for name in ("weight", "bias"):
        getattr(module.layers[1], name).requires_grad_(False)
    small(ranks, module)


@on_ranks(2, specs=SOME)
def test_small_buckets_with_buffers(ranks: Ranks) -> None:
    Trial(ranks, seeded(models.Normed), register=SMALL).steps(2)


@on_ranks(2, specs=ONE)
def test_new_buckets_after_a_forward_pass_are_refused(ranks: Ranks) -> None:
    """The old reducer may be waiting for gradients, and knows a static graph."""
    for ddp in ({}, {"static_graph": True}):
        model = ranks.wrap(seeded(models.Deep, 3, WIDE), **ddp)
        began = loss(model(batch(ranks.rank, 0, width=WIDE)))
        text = raised(RegisterError, lambda model=model: gradwire.register(model, "exact", **SMALL))
        assert "forward pass behind it" in text
        ranks.register(model)
        assert model.bucket_bytes_cap == 25 << 20
        began.backward()
        same_everywhere([param.grad for param in model.parameters()], ranks.group)


@on_ranks(2, specs=ONE)
def test_new_buckets_with_newly_frozen_parameters_are_refused(ranks: Ranks) -> None:
    """DDP goes on averaging them, should they be of use again."""
    module = seeded(models.Deep, 3, WIDE)
    model = ranks.wrap(module, find_unused_parameters=True)
    module.layers[0].requires_grad_(False)
    assert "frozen" in raised(RegisterError, lambda: gradwire.register(model, "exact", **SMALL))
    ranks.register(model)
    module.layers[0].requires_grad_(True)
    loss(model(batch(ranks.rank, 0, width=WIDE))).backward()
    same_everywhere([module.layers[0].weight.grad], ranks.group)


@on_ranks(2, specs=ONE)
def test_new_buckets_in_inference_mode(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 6))
    with torch.inference_mode():
        ranks.register(model, "exact", **SMALL)
    train(model, (batch(ranks.rank, step) for step in range(2)))


@on_ranks(2, specs=ONE)
def test_buckets_of_any_size(ranks: Ranks) -> None:
    for size, buckets in ((1e-9, 12), (1e30, 1), (2 if ranks.rank else 2.0, 1)):
        trial = Trial(ranks, seeded(models.Deep, 6), register={"bucket_mb": size}).steps(2)
        assert len(trial.hook.layouts) == buckets


@on_ranks(2, specs=ONE)
def test_old_reducer_is_freed(ranks: Ranks) -> None:
    """It would answer to the same gradients."""
    model = ranks.wrap(seeded(models.Deep, 6))
    old = model.reducer
    ranks.register(model, "exact", **SMALL)
    assert model.reducer is not old
    assert sys.getrefcount(old) == 2


@on_ranks(1, 2, specs=ONE)
def test_smaller_buckets_by_default(ranks: Ranks) -> None:
    """On the CPU, if the user gave DDP no size and there is more than one rank."""
    model = ranks.wrap(seeded(models.Deep, 3, WIDE))
    trial = Trial(ranks, model.module, model=model).steps(2, width=WIDE)
    assert model.bucket_bytes_cap == (25 << 20 if ranks.size == 1 else SMALLEST_BYTES)
    assert len(trial.hook.layouts) == (2 if ranks.size == 1 else 3)
    for spec, ddp in (("exact", {"bucket_cap_mb": 25}), ("powersgd:rank=1", {})):
        other = ranks.wrap(seeded(models.Deep, 3, WIDE), **ddp)
        ranks.register(other, spec)
        assert other.bucket_bytes_cap == 25 << 20


@on_ranks(2, specs=("bf16", "exact"))
def test_default_buckets_of_a_large_model(ranks: Ranks) -> None:
    """Quarters where nothing is encoded; `auto` starts with such a hook, but cuts for those that it may choose."""
    module = nn.ParameterList([torch.zeros(1 << 20) for _ in range(16)])
    model = ranks.wrap(module)
    ranks.register(model)
    assert model.bucket_bytes_cap == (64 << 20) // (4 if ranks.spec == "exact" else DEFAULT_BUCKETS)
    chosen = ranks.wrap(nn.ParameterList([torch.zeros(1 << 20) for _ in range(16)]))
    ranks.register(chosen, "auto")
    assert chosen.bucket_bytes_cap == (64 << 20) // DEFAULT_BUCKETS


@on_ranks(2, specs=("bf16",))
def test_default_buckets_do_not_count_ignored_parameters(ranks: Ranks) -> None:
    """They are a part of what DDP averages."""
    module = seeded(models.Deep, 8, WIDE)
    ignored = [name for name, _ in module.named_parameters() if int(name.split(".")[1]) >= 4]
    DDP._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = ranks.wrap(module)
    ranks.register(model)
    assert model.bucket_bytes_cap == SMALLEST_BYTES


@on_ranks(2, specs=ONE)
def test_model_of_one_bucket_keeps_its_reducer(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 2))
    old = model.reducer
    ranks.register(model)
    assert model.reducer is old


@on_ranks(2, specs=ONE)
def test_unknown_torch_keeps_its_buckets(ranks: Ranks) -> None:
    module = seeded(models.Deep, 6)
    model = ranks.wrap(module)
    cap = model.bucket_bytes_cap
    model._ddp_init_helper = lambda: None
    text = raised(RegisterError, lambda: gradwire.register(model, "exact", **SMALL))
    assert "bucket_cap_mb" in text
    assert model.bucket_bytes_cap == cap
    Trial(ranks, module, model=model).steps(2)
