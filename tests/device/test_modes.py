"""DDP's modes and what a hook can do, on the device: the same bits as on the CPU, under every schedule."""

from __future__ import annotations

import torch
from torch import Tensor

import gradwire
from gradwire.auto.pilot import Pilot
from gradwire.auto.settings import Auto
from gradwire.optim import DiLoCo, LocalSGD, step_in_backward
from gradwire.testing import device

from ..kit import models
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks
from ..kit.trial import loss, through_a_file
from .kit import on_device, same_bits, sgd, step, torch_kernels, trained, weights, wrap

FEEDBACK = "int8:feedback=true,exempt=none"
MODES = ("exact", FEEDBACK)
POWER_SGD = "powersgd:rank=1,min_compression=0.5"
RANK_2 = "powersgd:rank=2,batched=true,wire=int8,min_compression=0.5"


def kept(hook: gradwire.Hook) -> dict[str, Tensor]:
    return {f"residual of {name}": value.cpu() for name, value in hook.state_dict()["residuals"].items()}


@on_device(2, specs=MODES)
def test_accumulation_under_no_sync(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        hook, optimizer = ranks.register(model, bucket_mb=0.002), sgd(model.parameters())
        for number in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                loss(model(batch(ranks.rank, 10 + number).to(place))).backward()
            loss(model(batch(ranks.rank, number).to(place))).backward()
            optimizer.step()
        return weights(model) | kept(hook)

    same_bits(ranks, run)


@on_device(2, specs=(FEEDBACK,))
def test_watched_steps(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        hook, optimizer = ranks.register(model, bucket_mb=0.002, watch=2), sgd(model.parameters())
        for number in range(4):
            step(model, optimizer, ranks.rank, number)
        records = torch.tensor([[one.step, one.error, one.cosine] for one in hook.watched()], dtype=torch.float64)
        assert records[:, 0].tolist() == [2, 4]
        return weights(model) | {"records": records.float()}

    same_bits(ranks, run)


@on_device(2, specs=MODES)
def test_layers_used_on_some_ranks_only(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        module = seeded(models.Picky, 4)
        module.use = (0, 1 + ranks.rank % 2)
        return trained(ranks, place, module=module, find_unused_parameters=True)

    same_bits(ranks, run)


@on_device(2, specs=MODES)
def test_gradient_as_bucket_view(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place, gradient_as_bucket_view=True))


@on_device(2, specs=MODES)
def test_static_graph(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place, static_graph=True))


@on_device(2, specs=(FEEDBACK,))
def test_buckets_in_chunks(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place, seeded(models.Deep, 2, 48), bucket_cap_mb=1)
        hook, optimizer = ranks.register(model, chunk_bytes=4096), sgd(model.parameters())
        for number in range(2):
            optimizer.zero_grad()
            loss(model(batch(ranks.rank, number, 48).to(place))).backward()
            optimizer.step()
        return weights(model) | kept(hook)

    same_bits(ranks, run)


@on_device(2, specs=MODES)
def test_grad_scaler_skips_a_step(ranks: Ranks) -> None:
    """In the second step one rank has an inf: no rank steps, and the scale is halved."""

    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        hook, optimizer = ranks.register(model, bucket_mb=0.002), sgd(model.parameters())
        scaler = torch.amp.GradScaler(place, init_scale=1024.0)
        for number in range(3):
            optimizer.zero_grad()
            out = loss(model(batch(ranks.rank, number).to(place)))
            scaler.scale(out * float("inf") if number == 1 and ranks.rank == 0 else out).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        return weights(model) | kept(hook)

    same_bits(ranks, run)


@on_device(2, specs=(FEEDBACK, POWER_SGD))
def test_switch_applies_the_pending_residual(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        hook, optimizer = ranks.register(model, bucket_mb=0.002), sgd(model.parameters())
        for number, spec in enumerate((None, "bf16", "exact", FEEDBACK)):
            if spec:
                hook.switch(spec)
            step(model, optimizer, ranks.rank, number)
            step(model, optimizer, ranks.rank, 10 + number)
        return weights(model) | kept(hook)

    with torch_kernels():
        same_bits(ranks, run)


@on_device(2, specs=("exact", FEEDBACK, POWER_SGD))
def test_verify_leaves_training_as_it_is(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        hook, optimizer = ranks.register(model, bucket_mb=0.002), sgd(model.parameters())
        for number in range(3):
            step(model, optimizer, ranks.rank, number)
            assert hook.verify().identical
        return weights(model) | kept(hook)

    with torch_kernels():
        same_bits(ranks, run)


@on_device(2, 3, specs=(FEEDBACK, POWER_SGD))
def test_checkpoint_through_a_file(ranks: Ranks) -> None:
    """A state of each rank, and a merged one, go on where they were; the state is loaded on the default stream."""

    def run(place: str) -> dict[str, Tensor]:
        made = {}
        for merged in (False, True):
            model = wrap(ranks, place)
            hook, optimizer = ranks.register(model, bucket_mb=0.002), sgd(model.parameters())
            step(model, optimizer, ranks.rank, 0)
            step(model, optimizer, ranks.rank, 1)
            state = through_a_file(hook.state_dict(merged=merged))
            again = wrap(ranks, place, model.module)
            hook = ranks.register(again, bucket_mb=0.002)
            hook.load_state_dict(state)
            for number in (2, 3):
                step(again, optimizer, ranks.rank, number)
            made |= {f"{name}, merged={merged}": value for name, value in (weights(again) | kept(hook)).items()}
        return made

    with torch_kernels():
        same_bits(ranks, run)


@on_device(2, specs=(FEEDBACK,))
def test_scale_state(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        hook, optimizer = ranks.register(model, bucket_mb=0.002), sgd(model.parameters())
        for number in range(3):
            step(model, optimizer, ranks.rank, number)
            hook.scale_state(0.5)
        return weights(model) | kept(hook)

    same_bits(ranks, run)


@on_device(2)
def test_auto_chooses_by_the_same_steps(ranks: Ranks) -> None:
    """On a clock of the test's own, on which int8 is fastest."""

    def run(place: str) -> dict[str, Tensor]:
        model, now = wrap(ranks, place), [0.0]
        hook, optimizer = ranks.register(model, "exact", bucket_mb=0.002), sgd(model.parameters())
        hook.pilot = Pilot(hook, Auto(hooks=("int8",)), lambda: now[0])
        for number in range(60):
            step(model, optimizer, ranks.rank, number % 7)
            now[0] += 0.1 if str(hook.exchange) == "int8" else 0.2
        assert str(hook.exchange) == "int8"
        return weights(model)

    same_bits(ranks, run, ("lazy", "lazy_sides"))


@on_device(2, specs=(FEEDBACK,))
def test_step_in_backward(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        ranks.register(model, bucket_mb=0.002)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inside = step_in_backward(model, optimizer)
        for number in range(3):
            step(model, optimizer, ranks.rank, number)
        assert inside.steps == 3
        return weights(model)

    same_bits(ranks, run)


@on_device(2, specs=("exact", "int4:feedback=true,exempt=none"))
def test_local_sgd(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = seeded(models.Deep, 3).to(place)
        optimizer = sgd(model.parameters())
        with LocalSGD(model, optimizer, sync_every=2, exchange=ranks.spec, process_group=ranks.group):
            for number in range(5):
                step(model, optimizer, ranks.rank, number)
        return weights(model)

    same_bits(ranks, run)


@on_device(2, specs=("exact", "int8:feedback=true"))
def test_diloco_in_fragments_with_a_delay(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = seeded(models.Deep, 3).to(place)
        optimizer, options = sgd(model.parameters()), {"fragments": 2, "delay": 1, "exchange": ranks.spec}
        with DiLoCo(model, optimizer, sync_every=3, process_group=ranks.group, **options) as rounds:
            for number in range(7):
                step(model, optimizer, ranks.rank, number)
            made = {f"global {name}": value.cpu().clone() for name, value in rounds.named_globals()}
        return weights(model) | made

    same_bits(ranks, run)


# -- PowerSGD --------------------------------------------------------------------------------------------------------


@on_device(1, 2, 3, 4, specs=(POWER_SGD, RANK_2, f"{POWER_SGD},sides=one"))
def test_powersgd_has_the_bits_of_the_same_kernels_on_the_cpu(ranks: Ranks) -> None:
    with torch_kernels():
        same_bits(ranks, lambda place: trained(ranks, place))


@on_device(2, specs=(POWER_SGD,))
def test_powersgd_is_near_numbas_kernels(ranks: Ranks) -> None:
    """With Numba on the CPU the weights differ by rounding alone, and they do differ."""
    numba, here = trained(ranks, "cpu"), trained(ranks, "testdev")
    errors = [float((here[name] - value).abs().max()) for name, value in numba.items() if "residual" not in name]
    assert 0.0 < max(errors) < 1e-6, max(errors)


@on_device(2, specs=("int2:whiten=true,exempt=none",))
def test_whitening_by_the_state_of_the_optimizer(ranks: Ranks) -> None:
    """The optimizer writes the second moment on one stream, and the hook reads it on another; no host waits for it."""

    def run(place: str, spec: str) -> tuple[dict[str, Tensor], list[object]]:
        model, seen = wrap(ranks, place), []
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        hook = ranks.register(model, spec, optimizer=optimizer, bucket_mb=0.002)
        hook.steps = hook.exchange.warmup
        for number in range(4):
            device.reset_counters()
            step(model, optimizer, ranks.rank, number)
            seen.append(device.counters().reasons)
        return weights(model), seen

    same_bits(ranks, lambda place: run(place, ranks.spec)[0])
    plain = run(device.DEVICE, ranks.spec.replace("whiten=true", "whiten=false"))
    whitened = run(device.DEVICE, ranks.spec)
    assert plain[1] == whitened[1]
    assert any(not torch.equal(plain[0][name], value) for name, value in whitened[0].items())
