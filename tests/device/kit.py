"""Tests on the test device: `on_device` makes a test of a function, and `same_bits` compares training with the CPU's.

    @on_device(2, 3, specs=("int8",))
    def test_something(ranks: Ranks) -> None:
        same_bits(ranks, lambda place: trained(ranks, place))

The ranks of a test are processes that have loaded the device; all tests of one number of ranks share them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire import kernels
from gradwire.testing import device

from ..kit.models import Deep, batch, seeded
from ..kit.ranks import Body, Ranks, as_test, pool, run_body
from ..kit.trial import loss

Values = Mapping[str, Tensor]
"""What a training run has made, on the CPU."""

TIMEOUT_S = 150.0


def on_device(*sizes: int, specs: Sequence[str] = ("",)) -> Callable[[Body], Any]:
    """Make a test of a function: it runs on every rank of each of these numbers of ranks, for each of the specs."""
    cases = [pytest.param(size, spec, id=f"{size}-{spec}" if spec else str(size)) for size in sizes for spec in specs]
    ranks = functools.partial(pool, test_device=True)
    return lambda body: as_test(body, cases, ranks, run_on_device, TIMEOUT_S)


def run_on_device(rank: int, size: int, module: str, name: str, spec: str, folder: Path) -> None:
    """Run the body of a test on one rank. No rank leaves before its device has done what the other ranks wait for."""
    device.set_schedule("lazy")
    device.reset_counters()
    try:
        run_body(rank, size, module, name, spec, folder)
    finally:
        torch.accelerator.synchronize()


def same_bits(ranks: Ranks, run: Callable[[str], Values], schedules: Sequence[str] = tuple(device.SCHEDULES)) -> None:
    """`run("cpu")` and `run("testdev")`, under every schedule, must give the same bits."""
    wanted = run("cpu")
    for schedule in schedules:
        with following(schedule, seed=ranks.size):
            check_bits(run(device.DEVICE), wanted, f"{schedule}, rank {ranks.rank}")


@contextmanager
def following(schedule: str, seed: int = 0) -> Iterator[None]:
    device.set_schedule(schedule, seed)
    try:
        yield
    except BaseException as error:
        error.add_note(f"the schedule was {schedule!r}")
        raise
    device.set_schedule("lazy")


def check_bits(got: Values, wanted: Values, where: str) -> None:
    assert got.keys() == wanted.keys(), where
    for name, value in wanted.items():
        same = bits(got[name]) == bits(value)
        if not same.all():
            pytest.fail(f"{where}: {int((~same).sum())} bytes of {name} differ: {got[name]} instead of {value}")


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters as the host sees them. This synchronises."""
    return {name: param.detach().cpu().clone() for name, param in module.named_parameters()}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def wrap(ranks: Ranks, place: str, module: nn.Module | None = None, **options: Any) -> DDP:
    """A model on the device, in several buckets."""
    module = module or seeded(Deep, 3)
    return ranks.wrap(module.to(place), **{"bucket_cap_mb": 0.002, **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    place = next(model.parameters()).device
    loss(model(batch(rank, number).to(place))).backward()
    optimizer.step()


def trained(ranks: Ranks, place: str, spec: str | None = None, steps: int = 3, **options: Any) -> dict[str, Tensor]:
    """The weights after some steps with a hook, and what it keeps between steps."""
    model = wrap(ranks, place, **options)
    hook = ranks.register(model, spec, bucket_mb=0.002)
    optimizer = sgd(model.parameters())
    for number in range(steps):
        step(model, optimizer, ranks.rank, number)
    kept = {f"residual of {name}": value.cpu() for name, value in hook.state_dict()["residuals"].items()}
    made = weights(model) | kept
    hook.close()
    return made


def torch_kernels() -> AbstractContextManager[object]:
    """Without Numba's kernels: their products add up in another order than torch's, which run on accelerators."""
    return mock.patch.object(kernels, "_suits_numba", return_value=False)
