"""StreamRunner on the device: order between streams, memory, errors; and mutants of it, each of which is noticed."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.engine import lanes, stream
from gradwire.engine.residuals import Residuals
from gradwire.exchanges import Bucket
from gradwire.exchanges.base import Comm
from gradwire.optim import step_in_backward
from gradwire.testing import device

from ..kit.failing import Failing
from ..kit.ranks import Ranks
from ..kit.trial import raised
from .kit import check_bits, following, on_device, same_bits, sgd, step, torch_kernels, trained, weights, wrap

FEEDBACK = "int8:feedback=true,exempt=none"
POWER_SGD = "powersgd:rank=1,min_compression=0.5"
SCHEDULES = ("eager_sides", "lazy", "lazy_sides")
"""Those that show a missing order every time."""


# -- what must hold --------------------------------------------------------------------------------------------------


def weights_are_those_of_the_cpu(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place, FEEDBACK, steps=2), SCHEDULES)


def weights_are_those_of_the_cpu_in_many_orders(ranks: Ranks) -> None:
    """Memory that two streams write by turns is seen when they alternate."""
    wanted = trained(ranks, "cpu", FEEDBACK, steps=2)
    for seed in range(6):
        with following("shuffled", seed):
            check_bits(trained(ranks, "testdev", FEEDBACK, steps=2), wanted, f"shuffled, seed {seed}")


def parameters_are_stepped_after_the_mean(ranks: Ranks) -> None:
    def run(place: str) -> dict[str, Tensor]:
        model = wrap(ranks, place)
        hook = ranks.register(model, "exact", bucket_mb=0.002)
        optimizer = sgd(model.parameters())
        inside = step_in_backward(model, optimizer)
        for number in range(2):
            step(model, optimizer, ranks.rank, number)
        inside.close()
        hook.close()
        return weights(model)

    same_bits(ranks, run, SCHEDULES)


def new_runner(ranks: Ranks) -> stream.StreamRunner:
    return stream.StreamRunner(ranks.group, torch.device("testdev", 0))


def a_job_is_done_when_run_returns(ranks: Ranks) -> None:
    for schedule in SCHEDULES:
        with following(schedule):
            values, runner = torch.ones(4, device="testdev"), new_runner(ranks)
            runner.run(lambda comm, values=values: comm.all_reduce_(values))  # type: ignore[misc]
            wanted = torch.full((4,), float(ranks.size))
            check_bits({"sum": values.clone().cpu()}, {"sum": wanted}, schedule)


def memory_of_a_result_is_not_reused_before_its_job(ranks: Ranks) -> None:
    """As when backward fails after a bucket was handed over: nobody waits for the future, and the model is freed."""
    for schedule in SCHEDULES:
        with following(schedule):
            flat, runner = torch.ones(5000, device="testdev"), new_runner(ranks)
            runner.submit([scaling_job(flat)], flat)
            del flat
            other = torch.ones(5000, device="testdev")
            torch.accelerator.current_stream().synchronize()
            torch.accelerator.synchronize()
            check_bits({"other": other.cpu()}, {"other": torch.ones(5000)}, schedule)


def adopted_memory_is_not_reused_before_its_job(ranks: Ranks) -> None:
    """As when the state that was loaded is replaced: the job has yet to read it, and nobody else keeps it."""
    for schedule in SCHEDULES:
        with following(schedule):
            loaded, flat = [torch.ones(5000, device="testdev")], torch.zeros(5000, device="testdev")
            runner = new_runner(ranks)
            runner.adopt(loaded)
            runner.submit([lambda comm, loaded=loaded, flat=flat: flat.add_(loaded.pop())], flat)  # type: ignore[misc]
            torch.zeros(5000, device="testdev")
            torch.accelerator.current_stream().synchronize()
            torch.accelerator.synchronize()
            check_bits({"sum": flat.cpu()}, {"sum": torch.ones(5000)}, schedule)


def scaling_job(flat: Tensor) -> Callable[[Comm], None]:
    return lambda comm: comm.all_reduce_(flat).mul_(3)  # type: ignore[arg-type,return-value]


def a_loaded_state_is_not_overwritten(ranks: Ranks) -> None:
    """PowerSGD replaces the directions that were loaded while the side stream may still have to read them."""

    def run(place: str) -> dict[str, Tensor]:
        state: dict[str, object] = {}
        for number in range(2):
            model = wrap(ranks, place)
            hook = ranks.register(model, POWER_SGD, bucket_mb=0.002)
            if state:
                hook.load_state_dict(state)
            step(model, sgd(model.parameters()), ranks.rank, number)
            state = hook.state_dict()
            made = weights(model)
            hook.close()
        return made

    with torch_kernels():
        same_bits(ranks, run, SCHEDULES)


CHECKS = (
    weights_are_those_of_the_cpu,
    a_job_is_done_when_run_returns,
    memory_of_a_result_is_not_reused_before_its_job,
    parameters_are_stepped_after_the_mean,
    adopted_memory_is_not_reused_before_its_job,
    a_loaded_state_is_not_overwritten,
    weights_are_those_of_the_cpu_in_many_orders,
)


@on_device(2)
def test_the_runner_as_it_is_passes_all_checks(ranks: Ranks) -> None:
    for check in CHECKS:
        check(ranks)


# -- mutants ---------------------------------------------------------------------------------------------------------


@contextmanager
def edited(old: str, new: str) -> Iterator[None]:
    """`engine/stream.py` with a piece of its text replaced, wherever its names were imported."""
    source = inspect.getsource(stream)
    assert source.count(old) == 1, f"engine/stream.py no longer has exactly one {old!r}: change this mutant"
    module = types.ModuleType(stream.__name__)
    exec(compile(source.replace(old, new), stream.__file__, "exec"), vars(module))
    with mock.patch.multiple(stream, **{name: getattr(module, name) for name in public(module)}):
        users = [loaded for name, loaded in sys.modules.items() if name.startswith(("gradwire.", "tests."))]
        patches = [
            mock.patch.object(user, name, getattr(module, name))
            for user in users
            for name in public(module)
            if user is not stream and getattr(vars(user).get(name), "__module__", "") == stream.__name__
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def public(module: types.ModuleType) -> list[str]:
    defined = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return [name for name in defined if not name.startswith("_")]


def completed_early() -> AbstractContextManager[object]:
    """The future is complete for the caller's stream, which does not wait for the side stream."""
    submit = stream.StreamRunner.submit

    def mutant(self, jobs, result, after=None, **options):  # type: ignore[no-untyped-def]
        submit(self, jobs, result, after, **options)
        return stream.done(result)

    return mock.patch.object(stream.StreamRunner, "submit", mutant)


def after_on_the_callers_stream() -> AbstractContextManager[object]:
    submit = stream.StreamRunner.submit

    def mutant(self, jobs, result, after=None, **options):  # type: ignore[no-untyped-def]
        future = submit(self, jobs, result, None, **options)
        if after is not None:
            after()
        return future

    return mock.patch.object(stream.StreamRunner, "submit", mutant)


def work_space_of_another_stream() -> AbstractContextManager[object]:
    """Work space is allocated for the default stream, which may use it again while the side stream still does."""
    empty, main = lanes.empty, torch.accelerator.current_stream()

    def mutant(shape, dtype, device):  # type: ignore[no-untyped-def]
        with main:
            return empty(shape, dtype, device)

    return mock.patch.object(lanes, "empty", mutant)


def residuals_of_another_stream() -> AbstractContextManager[object]:
    """New residuals are set to zero on a stream that nobody waits for."""
    lay_out, other = Residuals._lay_out, torch.Stream(device="testdev")

    def mutant(self, key, bucket):  # type: ignore[no-untyped-def]
        with other:
            lay_out(self, key, bucket)

    return mock.patch.object(Residuals, "_lay_out", mutant)


WAIT = "self._stream.wait_stream(torch.accelerator.current_stream(self._device))"
MUTANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "the side stream does not wait for the gradients": lambda: edited(WAIT, "pass"),
    "the side stream waits for itself": lambda: edited(WAIT, "self._stream.wait_stream(self._stream)"),
    "the result is not recorded on the side stream": lambda: edited("result.record_stream(self._stream)", "pass"),
    "a loaded state is not recorded on the side stream": lambda: edited("tensor.record_stream(self._stream)", "pass"),
    "a future without devices": lambda: edited("Future(devices=[device])", "Future()"),
    "collectives are not waited for": lambda: edited("issue(TorchGroup(group)).wait()", "issue(TorchGroup(group))"),
    "run does not wait": lambda: edited("counted=False).wait()", "counted=False)"),
    "the future is complete too early": completed_early,
    "parameters are stepped on the caller's stream": after_on_the_callers_stream,
    "work space belongs to another stream": work_space_of_another_stream,
    "residuals are made on another stream": residuals_of_another_stream,
}


def is_rejected(ranks: Ranks, check: Callable[[Ranks], None]) -> bool:
    """Whether the check fails on any rank. All ranks must know before they go on."""
    failed = torch.zeros(1)
    try:
        check(ranks)
    except (AssertionError, pytest.fail.Exception):
        failed += 1
    device.set_schedule("lazy")
    dist.all_reduce(failed)
    return bool(failed)


@on_device(2, specs=tuple(MUTANTS))
def test_every_mutant_is_rejected(ranks: Ranks) -> None:
    with MUTANTS[ranks.spec]():
        assert any(is_rejected(ranks, check) for check in CHECKS)


# -- errors ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FailingOnTheDevice(Failing):
    """Fails in queued work, which the host notices later."""

    words: str = field(default="the kernel went wrong")

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        Failing.mean_(self, bucket, comm, residual)
        if next(self.jobs) >= self.at:
            device.enqueue(self._break, bucket.flat)

    def _break(self, flat: Tensor) -> None:
        raise ValueError(self.words)


@on_device(2)
def test_an_error_of_an_exchange_reaches_backward(ranks: Ranks) -> None:
    for schedule in device.SCHEDULES:
        with following(schedule):
            model = wrap(ranks, "testdev")
            ranks.register(model, Failing(ranks.rank, 2), bucket_mb=0.002)
            optimizer = sgd(model.parameters())
            step(model, optimizer, ranks.rank, 0)
            assert "boom" in raised((ValueError, RuntimeError), partial(step, model, optimizer, ranks.rank, 1))
            torch.accelerator.synchronize()
    same_bits(ranks, lambda place: trained(ranks, place, "exact"))


@on_device(2)
def test_an_error_in_queued_work_surfaces_at_the_next_synchronisation(ranks: Ranks) -> None:
    for schedule in device.SCHEDULES:
        with following(schedule):
            model = wrap(ranks, "testdev")
            ranks.register(model, FailingOnTheDevice(-1, 1), bucket_mb=0.002)
            step(model, sgd(model.parameters()), ranks.rank, 0)
            assert "the kernel went wrong" in raised(RuntimeError, torch.accelerator.synchronize)
    same_bits(ranks, lambda place: trained(ranks, place, "exact"))
