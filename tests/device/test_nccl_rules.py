"""NCCL's rules, on a backend that refuses what NCCL refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.engine.gloo import TorchGroup
from gradwire.engine.stream import level_groups
from gradwire.errors import ExchangeError, RegisterError
from gradwire.exchanges import Bucket, Comm, Exchange, exchange, make_bucket
from gradwire.exchanges.base import Levels
from gradwire.models.ddp import make_hook
from gradwire.testing import device

from ..kit.models import batch
from ..kit.ranks import SPECS, Ranks
from ..kit.trial import loss, raised
from .kit import following, on_device, sgd, step, wrap

CODED = tuple(spec for spec in SPECS if exchange(spec).lanes and not spec.startswith(("exact", "powersgd")))
ALLOWED = {torch.uint8, torch.float32, torch.float16, torch.bfloat16}


def here() -> torch.device:
    return torch.device(device.DEVICE, 0)


@dataclass(frozen=True, slots=True)
class Plain(Exchange):
    """An exchange whose `mean_` is the test's own."""

    name: ClassVar[str] = "plain"
    act: Callable[[Bucket, Comm], object]

    def bound(self, size: int) -> float:
        return 1.0

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        self.act(bucket, comm)

    def __str__(self) -> str:
        return "plain"


def train(ranks: Ranks, spec: str | Exchange, steps: int = 2) -> Any:
    model = wrap(ranks, device.DEVICE)
    hook = ranks.register(model, spec)
    optimizer = sgd(model.parameters())
    for number in range(steps):
        step(model, optimizer, ranks.rank, number)
    torch.accelerator.synchronize()
    return hook


@contextmanager
def recorded() -> Iterator[list[tuple[Any, str, Tensor]]]:
    """Every collective of the engine: its group, its name and what it sends."""
    seen: list[tuple[Any, str, Tensor]] = []
    kept = {name: getattr(TorchGroup, name) for name in ("all_reduce", "all_gather", "all_to_all")}
    for name, method in kept.items():

        def note(self: TorchGroup, *tensors: Tensor, name: str = name, method: Any = method) -> Any:
            seen.append((self._group, name, tensors[-1]))
            return method(self, *tensors)

        setattr(TorchGroup, name, note)
    try:
        yield seen
    finally:
        for name, method in kept.items():
            setattr(TorchGroup, name, method)


@contextmanager
def counted_groups() -> Iterator[list[dict[str, Any]]]:
    """The options of every group that is made."""
    made, make = [], dist.new_group

    def new_group(*args: Any, **options: Any) -> Any:
        made.append(options)
        return make(*args, **options)

    dist.new_group = new_group
    try:
        yield made
    finally:
        dist.new_group = make


# -- one communicator per group ---------------------------------------------------------------------------------------


@on_device(3, specs=("exact", "int8", "int4:feedback=true", "powersgd:rank=1,min_compression=0.5"))
def test_all_collectives_of_a_hook_are_on_the_models_own_group(ranks: Ranks) -> None:
    with counted_groups() as made, recorded() as seen:
        train(ranks, ranks.spec)
    assert made == []
    assert seen
    assert all(group is ranks.group for group, _, _ in seen)


@on_device(4)
def test_two_levels_have_one_group_each_made_once_by_its_members(ranks: Ranks) -> None:
    with counted_groups() as made, recorded() as seen:
        hook = train(ranks, "two_level(node=2)")
        for spec in ("int8", "two_level(node=2, across=int4)", "exact", "two_level(node=2)"):
            hook.switch(spec)
    assert [options["use_local_synchronization"] for options in made] == [True, True]
    assert len({id(group) for group, _, _ in seen}) == 3  # the model's own, for what the ranks agree on
    assert all("testccl" in str(options["backend"]) for options in made)


@on_device(4)
def test_ranks_outside_of_a_group_do_not_have_to_help(ranks: Ranks) -> None:
    """Ranks 2 and 3 never call anything."""
    group = dist.new_group([0, 1], backend=device.GROUP, use_local_synchronization=True) if ranks.rank < 2 else None
    if group is None:
        return
    hook = make_hook(exchange("two_level(node=1, across=int8)"), group, here())
    bucket = make_bucket([torch.full((100,), float(ranks.rank), device=here())])
    hook.mean(bucket).wait()
    assert bucket.flat.cpu().sub(0.5).abs().max() < 0.01
    hook.close()


@on_device(4)
def test_a_split_that_needs_all_ranks_is_refused(ranks: Ranks) -> None:
    """With `init_process_group(device_id=...)` NCCL splits groups off the default group, with all its ranks."""
    group = dist.new_group([0, 1], backend=device.GROUP)
    if ranks.rank > 1:
        return
    dist.group.WORLD.bound_device_id = here()
    try:
        text = raised(RegisterError, lambda: level_groups(group, Levels(1, 1, 1)))
    finally:
        dist.group.WORLD.bound_device_id = None
    assert "all its 4 ranks must take part, but the model's group has 2; remove device_id" in text


# -- order, types and sizes -------------------------------------------------------------------------------------------


@on_device(3, specs=("int8", "int4:feedback=true", "two_level(node=3)"))
def test_the_order_is_the_same_on_all_ranks_whatever_their_devices_do(ranks: Ranks) -> None:
    """Each rank follows a schedule of its own. The backend compares what the ranks are about to do."""
    schedule = ("lazy", "eager_sides", "shuffled")[ranks.rank]
    with following(schedule, seed=ranks.rank), recorded() as seen:
        train(ranks, ranks.spec, steps=3)
    orders: list[Any] = [None] * ranks.size
    mine = [(name, tensor.numel(), str(tensor.dtype)) for _, name, tensor in seen]
    dist.all_gather_object(orders, mine)
    assert orders[0]
    assert all(order == orders[0] for order in orders)


@on_device(2)
def test_another_order_on_one_rank_is_an_error_that_nobody_swallows(ranks: Ranks) -> None:
    def act(bucket: Bucket, comm: Comm) -> None:
        for call in (comm.all_gather, comm.all_reduce_)[:: 1 if comm.rank else -1]:
            call(bucket.flat)

    hook = make_hook(Plain(act), ranks.group, here())

    def run() -> None:
        hook.mean(make_bucket([torch.ones(10, device=here())])).wait()
        torch.accelerator.synchronize()

    text = raised(RuntimeError, run)
    assert "all_gather of 10 Float values" in text
    assert "all_reduce of 10 Float values" in text


@on_device(3, specs=CODED)
def test_encoded_values_travel_as_bytes(ranks: Ranks) -> None:
    model = wrap(ranks, device.DEVICE)
    hook = ranks.register(model)
    with recorded() as seen:
        loss(model(batch(ranks.rank, 0).to(device.DEVICE))).backward()
    torch.accelerator.synchronize()
    assert seen
    wire_sums = getattr(hook.exchange, "accumulate", "fp32") == "wire"
    assert {tensor.dtype for _, _, tensor in seen} <= ({torch.float16, torch.bfloat16} if wire_sums else {torch.uint8})


@on_device(2, specs=("exact", "powersgd:rank=1,min_compression=0.5", "two_level(node=2)"))
def test_all_other_values_travel_in_types_that_nccl_has(ranks: Ranks) -> None:
    with recorded() as seen:
        train(ranks, ranks.spec)
    assert {tensor.dtype for _, _, tensor in seen} <= ALLOWED
    assert all(tensor.is_contiguous() and tensor.numel() for _, _, tensor in seen)


class WithNothing(nn.Module):
    """A model with an empty parameter, whose type gives it a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) + self.nothing.sum().float()  # type: ignore[no-any-return]


@on_device(2, specs=("exact", "int8", "powersgd:rank=1,min_compression=0.5"))
def test_no_collective_has_an_empty_tensor(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = wrap(ranks, device.DEVICE, WithNothing(), init_sync=False)  # DDP would broadcast the empty one
    hook = ranks.register(model)
    for number in range(2):
        loss(model(batch(ranks.rank, number).to(device.DEVICE))).backward()
    torch.accelerator.synchronize()
    assert hook.verify().identical


@on_device(2)
def test_a_collective_on_an_empty_tensor_is_left_out(ranks: Ranks) -> None:
    nothing = torch.empty(0, device=here())
    shapes = []

    def act(bucket: Bucket, comm: Comm) -> None:
        shapes.extend(
            [
                comm.all_reduce_(nothing).shape,
                comm.all_gather(nothing).shape,
                comm.all_to_all(nothing.view(2, 0)).shape,
                comm.all_gather_(comm.rows(0, torch.uint8, here())).shape,
            ]
        )

    hook = make_hook(Plain(act), ranks.group, here())
    torch.accelerator.synchronize()
    device.reset_counters()
    hook.mean(make_bucket([torch.ones(10, device=here())])).wait()
    assert shapes == [(0,), (2, 0), (2, 0), (2, 0)]
    assert device.counters().collectives == 0
    assert "empty" in raised(RuntimeError, lambda: dist.all_reduce(nothing, group=ranks.group))


# -- errors -----------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    """Raised by the tests."""


@on_device(2)
def test_an_error_in_an_exchange_is_raised_by_backward_and_ends_the_hook(ranks: Ranks) -> None:
    def act(bucket: Bucket, comm: Comm) -> None:
        raise OwnError("the exchange is broken")

    model = wrap(ranks, device.DEVICE)
    hook = ranks.register(model, Plain(act))
    text = raised((OwnError, RuntimeError), lambda: loss(model(batch(0, 0).to(device.DEVICE))).backward())
    assert "the exchange is broken" in text
    bucket = make_bucket([torch.ones(4, device=here())])
    assert raised(ExchangeError, lambda: hook.mean(bucket)) == (
        "this hook stopped at an earlier error: OwnError: the exchange is broken"
    )


@on_device(2)
def test_an_error_of_a_collective_is_raised_as_it_is(ranks: Ranks) -> None:
    """What NCCL reports when TORCH_NCCL_ASYNC_ERROR_HANDLING aborts a communicator must not get lost in the engine."""

    class Broken:
        def wait(self) -> None:
            raise dist.DistBackendError("NCCL communicator was aborted on rank 1")

    hook = make_hook(exchange("int8"), ranks.group, here())
    kept, TorchGroup.all_gather = TorchGroup.all_gather, lambda self, out, tensor: Broken()
    try:
        bucket = make_bucket([torch.ones(100, device=here())])
        assert raised(dist.DistBackendError, lambda: hook.mean(bucket)) == "NCCL communicator was aborted on rank 1"
    finally:
        TorchGroup.all_gather = kept
    assert "DistBackendError: NCCL communicator was aborted" in raised(ExchangeError, lambda: hook.mean(bucket))


# -- graphs -----------------------------------------------------------------------------------------------------------


@on_device(2, specs=("int8:rounding=stochastic", "exact"))
def test_capturing_in_a_graph_is_refused(ranks: Ranks) -> None:
    model = wrap(ranks, device.DEVICE)
    hook = ranks.register(model)
    before = hook.state_dict()
    with device.capturing():
        text = raised((ExchangeError, RuntimeError), lambda: loss(model(batch(0, 0).to(device.DEVICE))).backward())
    assert "gradwire cannot be captured in a CUDA graph" in text
    assert "Leave the backward pass of the DDP model out of the graph" in text
    assert (hook.steps, hook.stats().buckets, hook.state_dict()) == (0, 0, before)
    bucket = make_bucket([torch.ones(4, device=here())])
    hook.mean(bucket).wait()  # outside of a capture the hook goes on
    assert bucket.flat.cpu().tolist() == pytest.approx([1.0] * 4)


@on_device(1)
def test_without_communication_a_capture_is_allowed(ranks: Ranks) -> None:
    hook = make_hook(exchange("int8"), ranks.group, here())
    with device.capturing():
        hook.mean(make_bucket([torch.ones(4, device=here())])).wait()
