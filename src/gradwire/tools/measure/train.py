"""What each rank does: train every hook's own model in turn, round after round, and measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.engine.hook import Hook
from gradwire.engine.verify import fingerprint
from gradwire.errors import VerifyError
from gradwire.models.ddp import register
from gradwire.tools.records.records import PLAIN, Record, Settings
from gradwire.tools.workload import Workload

UNTIMED_STEPS = 2
"""DDP cuts its buckets anew after the first step, and memory is first touched then."""
EVAL_UNITS = 3
"""For the progress bar: an evaluation takes about as long as so many steps."""

Report = Callable[[float, str], None]
"""Told which part of everything is done, and what is under way."""


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> list[dict[str, Any]]:
    """Measure all hooks of `job` on this rank, all ranks together. Every rank returns the same records."""
    report(0.0, "preparing the models")
    settings = Settings.from_dict(job["settings"])
    workload = Workload(settings.workload, seed=settings.seed, rank=rank, size=size)
    trainings = [Training(hook, workload, settings.bucket_mb) for hook in job["hooks"]]
    clock = Clock(len(trainings), settings, report)
    train(trainings, settings, clock)
    records = []
    for training in trainings:
        records.append(training.record().as_dict())
        clock.evaluated(training.name)
    for training in trainings:
        training.close()
    return records


def train(trainings: list[Training], settings: Settings, clock: Clock) -> None:
    """All of them, a round of steps at a time, until the steps are done or time is up."""
    untimed = min(UNTIMED_STEPS, settings.steps - 1)
    for index, first in enumerate(range(0, settings.steps, settings.round_steps)):
        steps = range(first, min(first + settings.round_steps, settings.steps))
        shift = index % len(trainings)  # so that nobody always has the first turn
        for training in trainings[shift:] + trainings[:shift]:
            dist.barrier()
            for step in steps:
                training.step(step, timed=step >= untimed, probed=step == steps[-1])
                clock.stepped(training.name)
        if clock.time_is_up():
            return


class Clock:
    """How far the run is, by steps or, with a time limit, by time."""

    def __init__(self, hooks: int, settings: Settings, report: Report) -> None:
        self._evaluations = hooks * EVAL_UNITS
        self._total = hooks * settings.steps + self._evaluations
        self._done = 0
        self._limit_s = settings.limit_s
        self._began = time.monotonic()
        self._report = report

    def stepped(self, hook: str) -> None:
        """A hook has trained a step."""
        self._done += 1
        training = 1 - self._evaluations / self._total
        self._report(max(self._done / self._total, min(self._time_used(), 1.0) * training), f"training {hook}")

    def evaluated(self, hook: str) -> None:
        """A hook has been evaluated."""
        self._evaluations -= EVAL_UNITS
        self._report(1 - self._evaluations / self._total, f"evaluating {hook}")

    def time_is_up(self) -> bool:
        """Whether to stop. The ranks must agree and their clocks do not, so any rank's word counts."""
        if self._limit_s is None:
            return False
        late = torch.tensor(float(self._time_used() >= 1.0))
        dist.all_reduce(late, dist.ReduceOp.MAX)
        return bool(late)

    def _time_used(self) -> float:
        return 0.0 if self._limit_s is None else (time.monotonic() - self._began) / self._limit_s


class Training:
    """One hook on a model of its own."""

    def __init__(self, name: str, workload: Workload, bucket_mb: float | None) -> None:
        self.name = name
        self._workload = workload
        self._model = DistributedDataParallel(workload.model(), bucket_cap_mb=bucket_mb)
        self._optimizer = workload.optimizer(self._model)
        self._hook = None if name == PLAIN else register(self._model, name)
        self._params = list(self._model.parameters())
        self._steps = 0
        self._times: list[float] = []
        self._errors: list[float] = []

    def step(self, step: int, *, timed: bool, probed: bool) -> None:
        """Train one step; if `probed`, compare its averaged gradient with the exact mean, outside the timing."""
        batch = self._workload.batch(step)
        exact = self._exact_mean(batch) if probed else None
        if timed and not self._times and self._hook is not None:
            self._hook.reset_stats()
        seconds = self._train_on(batch, self._workload.learning_rate(step))
        self._steps += 1
        if timed:
            self._times.append(seconds)
        if exact is not None:
            self._errors.append(self._error_of_gradient(exact))

    def record(self) -> Record:
        """Evaluate, and put everything together. All ranks together."""
        size = dist.get_world_size()
        params = sum(param.numel() for param in self._params)
        ring_bytes = 4 * params * 2 * (size - 1) / size
        verified, kept = _verify(self._hook)
        return Record(
            hook=self.name,
            steps=self._steps,
            step_s=tuple(over_ranks(self._times, dist.ReduceOp.MAX)),
            sent_bytes=ring_bytes if self._hook is None else self._hook.stats().sent_bytes,
            sent_is_counted=self._hook is not None,
            gradient_error=statistics.median(self._errors),
            loss=self._held_out_loss(),
            averages=self._hook is None or self._hook.exchange.bound(size) is not None,
            identical=_same_on_all_ranks(torch.stack([fingerprint(param) for param in self._params])),
            verified=verified,
            kept_promises=kept,
            params=params,
        )

    def close(self) -> None:
        """End the hook's threads and connections."""
        if self._hook is not None:
            self._hook.close()

    def _train_on(self, batch: Tensor, learning_rate: float) -> float:
        """Seconds of one step: forward, backward with the exchange in it, optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        began = time.perf_counter()
        self._optimizer.zero_grad()
        self._workload.loss(self._model, batch).backward()
        self._optimizer.step()
        return time.perf_counter() - began

    def _exact_mean(self, batch: Tensor) -> Tensor:
        """The float64 mean of the ranks' own gradients; `autograd.grad` passes DDP and its hook by."""
        loss = self._workload.loss(self._model.module, batch)
        own = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, self._params)]).double()
        dist.all_reduce(own)
        return own / dist.get_world_size()

    def _error_of_gradient(self, exact: Tensor) -> float:
        grads = [param.grad.flatten() for param in self._params if param.grad is not None]
        error = float((torch.cat(grads).double() - exact).norm() / exact.norm())
        return over_ranks([error], dist.ReduceOp.SUM)[0] / dist.get_world_size()

    def _held_out_loss(self) -> float:
        total, count = over_ranks(list(self._workload.held_out_loss(self._model.module)), dist.ReduceOp.SUM)
        return total / count


def _verify(hook: Hook | None) -> tuple[str, bool]:
    """What `Hook.verify()` found, and whether every promise holds."""
    if hook is None:
        return "", True
    try:
        return str(hook.verify()), True
    except VerifyError as error:
        return str(error), False


def over_ranks(values: list[float], operation: Any) -> list[float]:
    """Each value reduced over the ranks."""
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, operation)
    return [float(number) for number in numbers]


def _same_on_all_ranks(values: Tensor) -> bool:
    largest, smallest = values.clone(), values.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return bool((largest == smallest).all())
