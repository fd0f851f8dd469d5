"""DDP's modes, one check each."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import AVERAGING, MAIN, SPECS, Ranks, on_ranks
from ..kit.trial import Trial, same_everywhere, train
from ..kit.versions import ddp_option


def caps(ranks: Ranks, cap_mb: float, **ddp: object) -> Trial:
    """24 layers of 25 kB."""
    return Trial(ranks, seeded(models.Deep, 24, 80), bucket_cap_mb=cap_mb, **ddp).steps(3, width=80)


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_bucket_cap_25_mb(ranks: Ranks) -> None:
    trial = caps(ranks, 25)
    assert len(trial.hook.layouts) == 1


@on_ranks(2, specs=MAIN)
def test_bucket_cap_0_3_mb(ranks: Ranks) -> None:
    trial = caps(ranks, 0.3)
    assert len(trial.hook.layouts) == 2


@on_ranks(1, 2, 4, thorough=(3,), specs=MAIN)
def test_dozens_of_buckets_in_flight(ranks: Ranks) -> None:
    trial = caps(ranks, 0.02)
    assert len(trial.hook.layouts) >= 24


@on_ranks(2, thorough=(3,), specs=SPECS)
def test_dozens_of_buckets_and_chunks(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 12, 80), bucket_cap_mb=0.05, register={"chunk_bytes": 8192})
    trial.steps(3, width=80)
    assert len(trial.hook.layouts) >= 4


@on_ranks(2, specs=MAIN)
def test_buckets_are_recut_after_the_first_step(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002)
    trial.step(batch(ranks.rank, 0))
    assert trial.hook.stats().buckets == 1
    trial.hook.reset_stats()
    trial.step(batch(ranks.rank, 1))
    trial.step(batch(ranks.rank, 2))
    assert trial.hook.stats().buckets >= 3


@on_ranks(1, 2, 4, thorough=(3,), specs=MAIN)
def test_unused_layer(ranks: Ranks) -> None:
    module = seeded(models.Picky, 4)
    module.use = (0, 1, 3)
    trial = Trial(ranks, module, find_unused_parameters=True, bucket_cap_mb=0.002)
    trial.steps(2)
    assert trial.params[4].grad is None, "the unused layer has a gradient"


@on_ranks(1, 2, 4, thorough=(3,), specs=MAIN)
def test_layers_used_on_some_ranks_only(ranks: Ranks) -> None:
    module = seeded(models.Picky, 4)
    module.use = (0, 1 + ranks.rank % 2)
    Trial(ranks, module, find_unused_parameters=True, bucket_cap_mb=0.002).steps(2)


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_other_layers_at_every_step(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Picky, 4), find_unused_parameters=True, bucket_cap_mb=0.002)
    for step in range(4):
        trial.twin.use = trial.model.module.use = (step, (step + ranks.rank) % 4)
        trial.step(batch(ranks.rank, step))


@on_ranks(2, specs=MAIN)
def test_find_unused_parameters_where_none_is_unused(ranks: Ranks) -> None:
    Trial(ranks, seeded(models.Deep, 6), find_unused_parameters=True, bucket_cap_mb=0.002).steps(2)


@ddp_option("skip_all_reduce_unused_params")
@on_ranks(2, thorough=(3,), specs=MAIN)
def test_unused_layer_is_skipped(ranks: Ranks) -> None:
    """The last bucket never comes (its layer is the model's first), and the steps are counted all the same."""
    module = seeded(models.Picky, 4)
    module.use = (1, 2, 3)
    trial = Trial(ranks, module, find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.001)
    trial.steps(5)
    assert trial.params[0].grad is None


@on_ranks(1, 2, 4, thorough=(3,), specs=MAIN)
def test_static_graph(ranks: Ranks) -> None:
    Trial(ranks, seeded(models.Deep, 6), static_graph=True, bucket_cap_mb=0.002).steps(3)


@on_ranks(2, specs=MAIN)
def test_static_graph_with_layers_run_twice(ranks: Ranks) -> None:
    Trial(ranks, seeded(models.Reusing, 3), static_graph=True, bucket_cap_mb=0.002).steps(3)


@on_ranks(2, specs=MAIN)
def test_activation_checkpointing(ranks: Ranks) -> None:
    Trial(ranks, seeded(models.Checkpointed, 3), static_graph=True, bucket_cap_mb=0.002).steps(2)


@on_ranks(1, 2, 4, thorough=(3,), specs=MAIN)
def test_gradient_as_bucket_view(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 6), gradient_as_bucket_view=True, bucket_cap_mb=0.002)
    trial.steps(2)
    assert all(param.grad._is_view() for param in trial.params), "gradients are no longer views of the buckets"


@on_ranks(2, specs=MAIN)
def test_bucket_view_with_an_unused_layer(ranks: Ranks) -> None:
    module = seeded(models.Picky, 4)
    module.use = (0, 1, 3)
    Trial(ranks, module, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=0.002).steps(2)


@on_ranks(1, 2, 4, thorough=(3,), specs=SPECS)
def test_accumulation_under_no_sync(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002)
    for step in range(3):
        trial.step(*(batch(ranks.rank, 10 * step + part) for part in range(3)))
    assert trial.hook.steps == 3


@on_ranks(2, specs=MAIN)
def test_accumulation_in_bucket_views(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 6), bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    for step in range(2):
        trial.step(*(batch(ranks.rank, 10 * step + part) for part in range(2)))


@ddp_option("batched_grad_copy")
@on_ranks(1, 2, specs=MAIN)
def test_batched_grad_copy(ranks: Ranks) -> None:
    Trial(ranks, seeded(models.Deep, 6), batched_grad_copy=True, bucket_cap_mb=0.002).steps(2)


@ddp_option("bucket_cap_mb_list")
@on_ranks(2, specs=MAIN)
def test_bucket_caps_one_by_one(ranks: Ranks) -> None:
    Trial(ranks, seeded(models.Deep, 6, 64), bucket_cap_mb_list=[0.02, 0.04, 0.1]).steps(2, width=64)


@on_ranks(2, specs=MAIN)
def test_tied_weights(ranks: Ranks) -> None:
    Trial(ranks, seeded(models.Tied)).steps(2)


@on_ranks(2, specs=AVERAGING)
def test_buffers(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Normed)).steps(2)
    trial.model(batch(0, 9))
    same_everywhere(trial.model.buffers(), ranks.group)


@on_ranks(2, thorough=(3,), specs=MAIN)
def test_parameters_frozen_and_unfrozen_between_runs(ranks: Ranks) -> None:
    module = seeded(models.Deep, 4)
    for frozen in ((0, 2), (), (3,)):
        for index, layer in enumerate(module.layers):
            layer.requires_grad_(index not in frozen)
        trial = Trial(ranks, module, bucket_cap_mb=0.002)
        trial.steps(2)
        assert len(trial.params) == 8 - 2 * len(frozen)


@on_ranks(2, specs=MAIN)
def test_layer_frozen_before_registration(ranks: Ranks) -> None:
    """DDP knows the layer, and hands over zeros for it; the others are averaged as usual."""
    module = seeded(models.Deep, 3)
    model = ranks.wrap(module, find_unused_parameters=True)
    module.layers[1].requires_grad_(False)
    Trial(ranks, module, model=model).steps(2)


@on_ranks(2, specs=MAIN)
def test_layer_frozen_after_registration(ranks: Ranks) -> None:
    trial = Trial(ranks, seeded(models.Deep, 3), find_unused_parameters=True)
    for module in (trial.model.module, trial.twin):
        module.layers[1].requires_grad_(False)
    trial.steps(2)


@on_ranks(2, specs=MAIN)
def test_registration_after_some_steps(ranks: Ranks) -> None:
    module = seeded(models.Deep, 6)
    model = ranks.wrap(module, bucket_cap_mb=0.002)
    train(model, (batch(ranks.rank, step) for step in range(3)))
    Trial(ranks, module, model=model).steps(2)


@on_ranks(2, specs=MAIN)
def test_ignored_parameters(ranks: Ranks) -> None:
    """DDP leaves them to their rank, and so does the hook."""
    module = seeded(models.Deep, 3)
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.weight", "layers.1.bias"])
    trial = Trial(ranks, module)
    ignored = (2, 3)
    for step in range(3):
        local = trial.local(batch(ranks.rank, step))
        trial.backward(batch(ranks.rank, step))
        for index in ignored:
            assert torch.equal(trial.params[index].grad, local[index])
        others = [param for index, param in enumerate(trial.params) if index not in ignored]
        if ranks.exchange.lanes:
            same_everywhere([param.grad for param in others], ranks.group)
        trial.optimizer.step()
    assert trial.hook.verify().steps == 3
