"""What each rank of `gradwire bench` does: it trains every hook's own model in turn, round by round, and measures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.engine.fingerprint import fingerprint
from gradwire.engine.hook import Hook
from gradwire.errors import VerifyError
from gradwire.models.register import register
from gradwire.tools.launch.launch import Report
from gradwire.tools.launch.link import emulate
from gradwire.tools.records.records import NO_LINK, PLAIN, Record, Settings, Split
from gradwire.tools.workload import Workload

UNTIMED_STEPS = 2
"""DDP rebuilds its buckets after the first step, and memory is first touched in these steps."""
EVAL_UNITS = 3
"""For the progress bar: an evaluation takes about as long as this many steps."""


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> list[dict[str, Any]]:
    """Measure all hooks of `job` on its link, all ranks together. Every rank returns the same results."""
    report(0.0, "preparing the models")
    settings = Settings.from_dict(job["settings"])
    workload = Workload(settings.workload, seed=settings.seed, rank=rank, size=size)
    with nullcontext() if job["link"] == NO_LINK else emulate(job["link"]):
        trainings = [Training(hook, workload, settings.bucket_mb) for hook in job["hooks"]]
    clock = Clock(len(trainings), settings, report)
    train(trainings, settings, clock)
    results = []
    for training in trainings:
        results.append(training.result())
        clock.evaluated(training.name)
    for training in trainings:
        training.close()
    return results


def train(trainings: list[Training], settings: Settings, clock: Clock) -> None:
    """Train all of them, one round of steps at a time, until the steps are done or time is up."""
    untimed = min(UNTIMED_STEPS, settings.steps - 1)
    for index, first in enumerate(range(0, settings.steps, settings.round_steps)):
        steps = range(first, min(first + settings.round_steps, settings.steps))
        shift = index % len(trainings)  # so that no hook always has the first turn
        for training in trainings[shift:] + trainings[:shift]:
            dist.barrier()
            for step in steps:
                training.step(step, timed=step >= untimed, probed=step == steps[-1])
                clock.stepped(training.name)
        if clock.time_is_up():
            return


class Clock:
    """Reports how far the run is: by steps or, with a time limit, by time."""

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
        """Whether to stop. The ranks must agree although their clocks differ, so one rank is enough to stop all."""
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
        self._times: list[float] = []
        self._errors: list[float] = []
        self._losses: list[float] = []

    def step(self, step: int, *, timed: bool, probed: bool) -> None:
        """Train one step; if `probed`, compare its averaged gradient with the exact mean, outside the timing."""
        batch = self._workload.batch(step)
        exact = self._exact_mean(batch) if probed else None
        if timed and not self._times and self._hook is not None:
            self._hook.reset_stats()
        seconds = self._train_on(batch, self._workload.learning_rate(step))
        if timed:
            self._times.append(seconds)
        if exact is not None:
            self._errors.append(self._error_of_gradient(exact))

    def result(self) -> dict[str, Any]:
        """Evaluate, and return the record, the split and the losses as plain values. All ranks call it together."""
        record = self._record()
        split, losses = self._split(record), _mean_over_ranks(self._losses)
        return {"record": record.as_dict(), "split": None if split is None else asdict(split), "losses": losses}

    def close(self) -> None:
        """End the hook's threads and connections."""
        if self._hook is not None:
            self._hook.close()

    def _record(self) -> Record:
        size = dist.get_world_size()
        params = sum(param.numel() for param in self._params)
        ring_bytes = 4 * params * 2 * (size - 1) / size
        verified, kept = _verify(self._hook)
        return Record(
            hook=self.name,
            steps=len(self._losses),
            step_s=tuple(_over_ranks(self._times, dist.ReduceOp.MAX)),
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

    def _split(self, record: Record) -> Split | None:
        if self._hook is None:
            return None
        stats = self._hook.stats()
        parts = [stats.encode_s, stats.wire_s, stats.decode_s, stats.wait_s]
        encode_s, wire_s, decode_s, wait_s = _mean_over_ranks(parts)
        # The wait is a mean over all steps: its share of the mean step is applied to the median step.
        share = min(wait_s / statistics.mean(record.step_s), 1.0)
        compute_s, wait_s = record.median_s * (1 - share), record.median_s * share
        return Split(compute_s=compute_s, encode_s=encode_s, wire_s=wire_s, decode_s=decode_s, wait_s=wait_s)

    def _train_on(self, batch: Tensor, learning_rate: float) -> float:
        """Seconds of one step: forward, backward with the exchange in it, optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        began = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._workload.loss(self._model, batch)
        loss.backward()
        self._optimizer.step()
        seconds = time.perf_counter() - began
        self._losses.append(loss.item())
        return seconds

    def _exact_mean(self, batch: Tensor) -> Tensor:
        """The float64 mean of the ranks' own gradients. `autograd.grad` bypasses DDP and its hook."""
        loss = self._workload.loss(self._model.module, batch)
        own = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, self._params)]).double()
        dist.all_reduce(own)
        return own / dist.get_world_size()

    def _error_of_gradient(self, exact: Tensor) -> float:
        grads = [param.grad.flatten() for param in self._params if param.grad is not None]
        return _mean_over_ranks([float((torch.cat(grads).double() - exact).norm() / exact.norm())])[0]

    def _held_out_loss(self) -> float:
        total, count = _over_ranks(list(self._workload.held_out_loss(self._model.module)), dist.ReduceOp.SUM)
        return total / count


def _verify(hook: Hook | None) -> tuple[str, bool]:
    """The report of `Hook.verify()`, and whether every promise holds."""
    if hook is None:
        return "", True
    try:
        return str(hook.verify()), True
    except VerifyError as error:
        return str(error), False


def _over_ranks(values: list[float], operation: Any) -> list[float]:
    """Each value reduced over the ranks."""
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, operation)
    return [float(number) for number in numbers]


def _mean_over_ranks(values: list[float]) -> list[float]:
    return [value / dist.get_world_size() for value in _over_ranks(values, dist.ReduceOp.SUM)]


def _same_on_all_ranks(values: Tensor) -> bool:
    largest, smallest = values.clone(), values.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return bool((largest == smallest).all())
