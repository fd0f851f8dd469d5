"""What a hook on a model with `fully_shard` does: gathers, feedback, replicas, statistics, switching."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire import VerifyError
from gradwire.engine.sharded import ShardedHook

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import HeldComm, backward, error, gradients, mesh_2d, mesh_of, same, shard, train, units, weights
from ..kit.trial import raised
from ..kit.versions import sharded_models

pytestmark = sharded_models
POWER_SGD = tuple(f"powersgd:rank=1,min_compression=0.5,sides={sides}" for sides in ("two", "one"))


def deep(ranks: Ranks, **options: Any) -> Any:
    return shard(seeded(models.Deep), mesh_of(ranks), **options)


def plain_gradients(size: int, step: int) -> dict[str, torch.Tensor]:
    """The mean of the gradients of all ranks, on one process."""
    module = seeded(models.Deep)
    for rank in range(size):
        (module(batch(rank, step)).square().mean() / size).backward()
    return gradients(module)


# -- gathered parameters ---------------------------------------------------------------------------------------------


@on_ranks(2, 4, specs=("bf16", "int8", "int4:exempt=none"))
def test_all_ranks_compute_with_the_same_decoded_parameters_and_keep_exact_shards(ranks: Ranks) -> None:
    model = deep(ranks)
    before = weights(model)
    ranks.register(model, "exact", gather=ranks.spec)
    for unit in units(model):
        unit.unshard()
    seen = torch.cat([param.detach().flatten() for param in model.parameters()])
    for unit in units(model):
        unit.reshard()
    rows = [torch.empty_like(seen) for _ in range(ranks.size)]
    dist.all_gather(rows, seen, group=ranks.group)
    assert all(torch.equal(row, rows[0]) for row in rows)
    exact = torch.cat([value.flatten() for value in before.values()])
    off = float((seen - exact).norm() / exact.norm())
    assert 0 < off < 2 * gradwire.exchange(ranks.spec).codec.bound
    if ranks.spec == "bf16":
        assert torch.equal(seen, exact.bfloat16().float())
    assert same(weights(model), before)


@on_ranks(4)
def test_parameters_that_stay_on_fewer_ranks_after_forward_are_gathered_exactly_from_there(ranks: Ranks) -> None:
    wanted = train(deep(ranks, reshard_after_forward=2), ranks.rank)
    model = deep(ranks, reshard_after_forward=2)
    ranks.register(model, "exact")
    assert all(same(*pair) for pair in zip(train(model, ranks.rank), wanted, strict=True))
    model = deep(ranks, reshard_after_forward=2)
    hook = ranks.register(model, "exact", gather="int8")
    whole = deep(ranks)
    ranks.register(whole, "exact", gather="int8")
    assert all(same(*pair) for pair in zip(train(model, ranks.rank), train(whole, ranks.rank), strict=True))
    hook.verify()


# -- gradients -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_factor_that_gloo_cannot_multiply_by_works(ranks: Ranks) -> None:
    """Plain FSDP2 fails here: gloo has no PREMUL_SUM."""
    wanted = {name: grad * 2 / 3 for name, grad in plain_gradients(2, 0).items()}
    for spec, bound in (("exact", 1e-6), ("int8", 0.02)):
        model = deep(ranks)
        for unit in units(model):
            unit.set_gradient_divide_factor(3.0)
        ranks.register(model, spec)
        assert error(train(model, ranks.rank, 1)[0], wanted) < bound


@on_ranks(2, specs=("fp8", "int6", "int5", "int4", "int3", "int2", "sign", "topk:ratio=0.1"))
def test_every_codec_reduces_with_the_error_of_the_ddp_hook(ranks: Ranks) -> None:
    wanted = plain_gradients(2, 0)
    model = deep(ranks)
    hook = ranks.register(model, ranks.spec)
    got = train(model, ranks.rank, 1)[0]
    hook.verify()
    ddp = ranks.wrap(seeded(models.Deep))
    ranks.register(ddp, ranks.spec)
    ddp(batch(ranks.rank, 0)).square().mean().backward()
    reference = {name.removeprefix("module."): grad for name, grad in gradients(ddp).items()}
    assert error(got, wanted) <= 1.2 * error(reference, wanted)


@on_ranks(2, 4, specs=("int2:feedback=true,exempt=none", "int2:feedback=true,exempt=none,residual=int8"))
def test_feedback_keeps_what_the_reduce_scatter_loses(ranks: Ranks) -> None:
    packed = "residual" in ranks.spec
    model = deep(ranks)
    hook = ranks.register(model, ranks.spec, chunk_bytes=1024)
    assert isinstance(hook, ShardedHook)
    total: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for step in range(4):
        model.zero_grad()
        backward(model, ranks.rank, step)
        for name, grad in gradients(model).items():
            total[name] = total.get(name, 0) + grad
        for name, grad in plain_gradients(ranks.size, step).items():
            wanted[name] = wanted.get(name, 0) + grad
    kept = hook.state_dict(merged=True)["residuals"]
    emitted = {name: total[name] + kept[name].view(total[name].shape) / ranks.size for name in total}
    assert error(total, wanted) > 0.1
    assert error(emitted, wanted) < (0.02 if packed else 1e-5)
    if not packed:
        assert hook.residual_bytes == 4 * sum(value.numel() for value in wanted.values())
    hook.verify()


@on_ranks(2)
def test_a_step_with_an_inf_reaches_the_result_and_leaves_the_residual(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, "int4:feedback=true,exempt=none")
    train(model, ranks.rank, 2)
    before = hook.state_dict()["residuals"]
    assert any(value.any() for value in before.values())
    model.zero_grad()
    (model(batch(ranks.rank, 3)) * (math.inf if ranks.rank else 1.0)).square().mean().backward()
    assert not all(torch.isfinite(grad).all() for grad in gradients(model).values())
    after = hook.state_dict()["residuals"]
    last = [name for name in before if name.startswith("layers.2")]
    assert all(torch.equal(before[name], after[name]) for name in last)


@on_ranks(2)
def test_switch_changes_each_direction_and_applies_what_feedback_has_kept(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, "int2:feedback=true,exempt=none", gather="bf16")
    assert isinstance(hook, ShardedHook)
    backward(model, ranks.rank, 0)
    model.zero_grad()
    kept = hook.state_dict(merged=True)["residuals"]
    hook.switch("exact", gather="exact")
    backward(model, ranks.rank, 1)
    wanted = {name: grad + kept[name].view(grad.shape) / 2 for name, grad in plain_gradients(2, 1).items()}
    assert error(gradients(model), wanted) < 1e-5
    assert hook.residual_bytes == 0
    assert hook.stats().hook == "exact, gather=exact"
    assert "no replicas" in raised(gradwire.RegisterError, lambda: hook.switch(replicas="int8"))
    assert "sharded model" in raised(gradwire.SpecError, lambda: hook.switch("powersgd"))


@on_ranks(2)
def test_noop_leaves_every_rank_its_own_part(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, "noop")
    backward(model, ranks.rank, 0)
    own = plain_gradients(1, 0) if ranks.rank == 0 else None
    local = model.layers[0].weight.grad.to_local()
    if own is not None:
        assert torch.allclose(local, own["layers.0.weight"][: local.shape[0]])
    assert hook.verify().error is None


# -- statistics, closing, groups ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_stats_count_what_each_direction_sends(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, "bf16", gather="bf16")
    assert isinstance(hook, ShardedHook)
    train(model, ranks.rank, 3)
    parts, total = hook.stats_by_part(), hook.stats()
    count = sum(param.numel() for param in model.parameters())
    assert parts["gradients"].sent_bytes == count  # half of the values, 2 bytes each
    assert parts["parameters"].sent_bytes == 2 * count  # in forward, and again in backward
    assert total.sent_bytes == 3 * count
    assert total.steps == parts["parameters"].steps == 3
    assert parts["gradients"].buckets == 3
    assert total.wait_s > 0
    hook.reset_stats()
    assert hook.stats().steps == 0


@on_ranks(2)
def test_after_close_the_model_trains_on_as_plain_fsdp2(ranks: Ranks) -> None:
    plain, model = deep(ranks), deep(ranks)
    hook = gradwire.register(model, "exact")
    train(model, ranks.rank, 2)
    train(plain, ranks.rank, 2)
    dist.barrier(group=ranks.group)
    hook.close()
    hook.close()
    assert all(same(*pair) for pair in zip(train(model, ranks.rank), train(plain, ranks.rank), strict=True))
    again = ranks.register(model, "int8")
    train(model, ranks.rank, 1)
    again.verify()


def _swap_halves(values: torch.Tensor) -> None:
    half = values.numel() // 2
    values[: 2 * half].copy_(values[: 2 * half].roll(half))


SPOILS: dict[str, Any] = {
    "zeros": lambda values: values.zero_(),
    "sum instead of mean": lambda values: values.mul_(2),
    "1% gain": lambda values: values.mul_(1.01),
    "a value off by a bit": lambda values: values[:1].mul_(1 + 2**-23),
    "chunks swapped": _swap_halves,
    "last block dropped": lambda values: values[-32:].zero_(),
    "values shifted": lambda values: values.copy_(values.roll(1)),
    "NaN hidden": lambda values: values.nan_to_num_(0.0, 0.0, 0.0),
}
"""What a wrong reduce-scatter or gather makes of its result."""


def spoiled(jobs: Any, spoil: Any) -> Any:
    """Make jobs as `jobs` does, of which the only one changes its result by `spoil`, which takes the same arguments."""

    def made(*args: Any) -> Any:
        (job,) = jobs(*args)

        def run(comm: Any) -> None:
            job(comm)
            spoil(*args)

        return [run]

    return made


@on_ranks(2)
def test_verify_needs_a_step_and_rejects_wrong_results(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, "int8", gather="int8")
    assert isinstance(hook, ShardedHook)
    assert "has not run" in raised(VerifyError, hook.verify)
    train(model, ranks.rank, 1)
    assert "replicas bit-identical" in str(hook.verify())
    scatter, gather = hook.scatter_jobs, hook.gather_jobs
    for kind, spoil in SPOILS.items():
        hook.scatter_jobs = spoiled(scatter, lambda bucket, *rest, spoil=spoil: spoil(bucket.flat))
        assert "not that of its reference" in raised(VerifyError, hook.verify), kind
        hook.scatter_jobs = scatter  # type: ignore[method-assign]
        if kind != "NaN hidden":  # parameters are tried without any
            hook.gather_jobs = spoiled(gather, lambda bucket, rows, spoil=spoil: spoil(rows[0]))
            assert "gathered parameters" in raised(VerifyError, hook.verify), kind
            hook.gather_jobs = gather  # type: ignore[method-assign]
    hook.verify()


@on_ranks(2, specs=("int2:feedback=true,exempt=none", "int2:feedback=true,exempt=none,residual=int8"))
def test_verify_rejects_wrong_residuals(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model)
    assert isinstance(hook, ShardedHook)
    train(model, ranks.rank, 1)
    hook.verify()
    jobs = hook.scatter_jobs
    for kind, change in {"lost": lambda kept: kept * 0, "kept twice": lambda kept: kept * 2}.items():

        def spoil(bucket: Any, rows: Any, alpha: float, store: Any, change: Any = change) -> None:
            for _, chunk in hook.columns(bucket, rows.element_size(), hook.exchange):
                store.put(chunk.segments, change(store.take(chunk.segments)))

        hook.scatter_jobs = spoiled(jobs, spoil)
        assert "residual" in raised(VerifyError, hook.verify), kind
    hook.scatter_jobs = jobs  # type: ignore[method-assign]
    hook.verify()


@on_ranks(2)
def test_a_model_without_a_common_root_waits_for_every_part(ranks: Ranks) -> None:
    """FSDP2 reduces the last part in a callback at the end of the backward pass, after the hook has waited once."""
    model = seeded(models.Deep)
    for layer in model.layers:
        shard(layer, mesh_of(ranks))
    hook, waited = ranks.register(model, "int8"), []
    blocked = hook.blocked
    hook.blocked = lambda what, wait: (waited.append(what), blocked(what, wait))[1]
    assert error(train(model, ranks.rank, 1)[0], plain_gradients(2, 0)) < 0.05
    assert waited.count("gradients") == len(model.layers)


@on_ranks(4)
def test_several_models_on_sub_groups_train_side_by_side(ranks: Ranks) -> None:
    groups = [ranks.new_group([0, 1]), ranks.new_group([2, 3])]
    mesh = mesh_of(ranks, groups[ranks.rank // 2])
    made = [shard(seeded(models.Deep), mesh) for _ in range(2)]
    hooks = [ranks.register(model, "int8", gather="int8") for model in made]
    for step in range(2):
        for model in made:
            model.zero_grad()
        outputs = [model(batch(ranks.rank, step)).square().mean() for model in made]
        sum(outputs).backward()  # type: ignore[union-attr]
    assert same(gradients(made[0]), gradients(made[1]))
    for hook in hooks:
        assert hook.verify().steps == 2


@on_ranks(1)
def test_a_single_rank_needs_no_communication(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, "int8", gather="int8")
    assert error(train(model, 0, 1)[0], plain_gradients(1, 0)) < 1e-6
    assert hook.verify().error == 0.0
    assert hook.stats().sent_bytes == 0


# -- replicas --------------------------------------------------------------------------------------------------------


@on_ranks(4, specs=("exact", "int8", "int4:feedback=true,exempt=none", "powersgd:rank=2,min_compression=0.5"))
def test_hsdp_averages_across_replicas(ranks: Ranks) -> None:
    mesh, module = mesh_2d(ranks, 2), seeded(models.Deep)
    hook = gradwire.hsdp(module, mesh, units=module.layers, replicas=ranks.spec, chunk_bytes=1024)
    ranks.hooks.append(hook)
    assert isinstance(hook, ShardedHook)
    got = train(module, ranks.rank, 3)
    limit = {"e": 1e-6, "i": 0.03, "p": 1.0}[ranks.spec[0]] if "int4" not in ranks.spec else 0.2
    assert error(got[0], plain_gradients(4, 0)) < limit
    text = str(hook.verify())
    assert "3 steps" in text
    assert f"replicas={ranks.spec.split(':')[0]}" in text
    native = shard(seeded(models.Deep), mesh)
    if ranks.spec == "exact":
        assert error(got[-1], train(native, ranks.rank, 3)[-1]) < 1e-5
    assert hook.stats_by_part()["replicas"].sent_bytes > 0


@on_ranks(4)
def test_hsdp_compresses_all_three_directions(ranks: Ranks) -> None:
    mesh, module = mesh_2d(ranks, 2), seeded(models.Deep)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    hook = gradwire.hsdp(module, mesh, "int8", units=module.layers, gather="int8", replicas="int8", **options)
    ranks.hooks.append(hook)
    assert error(train(module, ranks.rank, 1)[0], plain_gradients(4, 0)) < 0.05
    hook.verify()
    hook.switch(replicas="exact")
    train(module, ranks.rank, 1)
    assert hook.stats().hook == "int8, gather=int8, replicas=exact"


@on_ranks(4)
def test_an_all_reduce_can_be_put_off_and_a_factor_divides_the_sum_over_all_ranks(ranks: Ranks) -> None:
    mesh, module = mesh_2d(ranks, 2), seeded(models.Deep)
    hook = gradwire.hsdp(module, mesh, units=module.layers, replicas="exact")
    ranks.hooks.append(hook)
    module.set_requires_all_reduce(False)
    backward(module, ranks.rank, 0)
    module.set_requires_all_reduce(True)
    backward(module, ranks.rank, 1)
    both = [plain_gradients(4, step) for step in (0, 1)]
    wanted = {name: both[0][name] + both[1][name] for name in both[0]}
    assert error(gradients(module), wanted) < 1e-6
    module.zero_grad()
    for unit in units(module):
        unit.set_gradient_divide_factor(8.0)
    backward(module, ranks.rank, 0)
    assert error(gradients(module), {name: grad / 2 for name, grad in both[0].items()}) < 1e-6


@on_ranks(2, specs=("exact", "bf16", "int8", "int4:feedback=true,exempt=none", *POWER_SGD))
def test_data_parallel_training_without_ddp_gives_the_bits_of_the_ddp_hook(ranks: Ranks) -> None:
    module = seeded(models.Deep)
    hook = gradwire.hsdp(module, mesh_2d(ranks, 2), replicas=ranks.spec)
    ranks.hooks.append(hook)
    got = train(module, ranks.rank, 3)
    model: DDP = ranks.wrap(seeded(models.Deep))
    ranks.register(model)
    wanted = train(model, ranks.rank, 3)
    for one, other in zip(got, wanted, strict=True):
        assert same(one, {name.removeprefix("module."): grad for name, grad in other.items()})
    hook.verify()


# -- when results are waited for ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_reduction_is_waited_for_at_the_end_of_backward_unless_somebody_reads_it_earlier(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, "int8")
    assert isinstance(hook, ShardedHook)
    reached, jobs, in_time = threading.Event(), hook.scatter_jobs, list[bool]()

    def held(job: Any, comm: Any) -> None:
        job(HeldComm(comm, lambda: in_time.append(reached.wait(30.0))))  # until backward has come to the first layer

    hook.scatter_jobs = lambda *args: [partial(held, job) for job in jobs(*args)]  # type: ignore[method-assign]

    def watch(module: Any, inputs: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: reached.set())

    watching = model.layers[0].register_forward_hook(watch)
    wanted = train(model, ranks.rank, 1)[0]
    watching.remove()
    assert in_time == [True] * 3
    seen: list[torch.Tensor] = []
    again = deep(ranks)
    ranks.register(again, "int8")
    for param in again.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    got = train(again, ranks.rank, 1)[0]
    assert same(got, wanted)
    local = [param.grad.to_local() for layer in reversed(again.layers) for param in layer.parameters()]
    assert len(seen) == len(local)
    assert all(torch.equal(*pair) for pair in zip(seen, local, strict=True))


@on_ranks(4, specs=("exact", "int8"))
def test_averages_across_replicas_are_waited_for_at_the_end_of_backward(ranks: Ranks) -> None:
    """Those of all layers but the first go on beside the backward pass, and so do the reductions before them."""
    module = seeded(models.Deep)
    hook = gradwire.hsdp(module, mesh_2d(ranks, 2), ranks.spec, units=module.layers, replicas="int8")
    ranks.hooks.append(hook)
    wanted = train(module, ranks.rank, 1)[0]
    again = seeded(models.Deep)
    other = gradwire.hsdp(again, mesh_2d(ranks, 2), ranks.spec, units=again.layers, replicas="int8")
    ranks.hooks.append(other)
    reached, jobs, in_time = threading.Event(), other.replicas._jobs, list[bool]()  # type: ignore[attr-defined]

    def held(job: Any, comm: Any) -> None:
        in_time.append(reached.wait(30.0))
        job(comm)

    other.replicas._jobs = lambda *args: [partial(held, job) for job in jobs(*args)]  # type: ignore[attr-defined]

    def watch(layer: Any, inputs: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: reached.set())

    again.layers[0].register_forward_hook(watch)
    assert same(train(again, ranks.rank, 1)[0], wanted)
    assert in_time == [True] * 3
    other.verify()


@on_ranks(2)
def test_an_error_in_an_exchange_is_raised_by_backward_on_all_ranks(ranks: Ranks) -> None:
    model = deep(ranks)
    hook = ranks.register(model, "int8")
    assert isinstance(hook, ShardedHook)
    train(model, ranks.rank, 1)
    if ranks.rank == 1:

        def fail(comm: Any) -> None:
            raise ValueError("the wire is cut")

        hook.scatter_jobs = lambda *args: [fail]  # type: ignore[method-assign]
    model.zero_grad()
    text = raised(RuntimeError, lambda: backward(model, ranks.rank, 1))
    assert "the wire is cut" in text
