"""What each rank does for `gradwire bench`: as `train.py`, on an emulated link if asked, keeping losses and times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gradwire.tools.launch.link import emulate
from gradwire.tools.measure.train import Clock, Report, Training, over_ranks, train
from gradwire.tools.records.records import NO_LINK, Record, Settings, Split
from gradwire.tools.workload import Workload


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> list[dict[str, Any]]:
    """Measure all hooks of `job` on its link, all ranks together. Every rank returns the same."""
    report(0.0, "preparing the models")
    settings = Settings.from_dict(job["settings"])
    workload = HeardWorkload(settings.workload, seed=settings.seed, rank=rank, size=size)
    with _on(job["link"]):
        trainings = [WatchedTraining(hook, workload, settings.bucket_mb) for hook in job["hooks"]]
    clock = Clock(len(trainings), settings, report)
    train(list(trainings), settings, clock)
    results = []
    for training in trainings:
        results.append(training.result())
        clock.evaluated(training.name)
    for training in trainings:
        training.close()
    return results


def _on(link: str) -> AbstractContextManager[object]:
    return nullcontext() if link == NO_LINK else emulate(link)


class HeardWorkload(Workload):
    """Remembers the last loss it gave out."""

    last: Tensor

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy of every next byte, in nats."""
        loss = super().loss(model, batch)
        self.last = loss.detach()
        return loss


class WatchedTraining(Training):
    """Keeps the training loss of every step, and where the time went."""

    def __init__(self, name: str, workload: HeardWorkload, bucket_mb: float | None) -> None:
        super().__init__(name, workload, bucket_mb)
        self._heard = workload
        self._losses: list[float] = []

    def step(self, step: int, *, timed: bool, probed: bool) -> None:
        """Train one step."""
        super().step(step, timed=timed, probed=probed)
        self._losses.append(float(self._heard.last))

    def result(self) -> dict[str, Any]:
        """The record, the split and the losses, as plain values. All ranks together."""
        record = self.record()
        split, losses = self._split(record), _meanover_ranks(self._losses)
        return {"record": record.as_dict(), "split": None if split is None else asdict(split), "losses": losses}

    def _split(self, record: Record) -> Split | None:
        if self._hook is None:
            return None
        stats = self._hook.stats()
        encode_s, wire_s, decode_s, wait_s = _meanover_ranks(
            [stats.encode_s, stats.wire_s, stats.decode_s, stats.wait_s]
        )
        # Waiting is a mean over steps and so is this rest of the step; their shares are those of the median step.
        share = min(wait_s / statistics.mean(record.step_s), 1.0)
        compute_s, wait_s = record.median_s * (1 - share), record.median_s * share
        return Split(compute_s=compute_s, encode_s=encode_s, wire_s=wire_s, decode_s=decode_s, wait_s=wait_s)


def _meanover_ranks(values: list[float]) -> list[float]:
    return [value / dist.get_world_size() for value in over_ranks(values, dist.ReduceOp.SUM)]
