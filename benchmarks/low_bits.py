"""Does training with 2 bits and less reach the loss of exact averaging? Simulated workers in one process.

    python benchmarks/low_bits.py --methods exact int2 int2:whiten=true --seeds 100 101 102 --steps 500
    python benchmarks/low_bits.py --table low_bits.jsonl

The model is gradwire's built-in byte-level GPT with 0.47M parameters, trained with AdamW on 4 workers that see different
data. The workers share one copy of the parameters, as replicas do, and the averages are the exchanges' references, which
`Hook.verify()` compares real averages with, bit for bit. The loss does not depend on the load of the machine. Runs that
the file has already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import gradwire
from gradwire import kernels
from gradwire.exchanges.bucket import Bucket, make_bucket, segments_of
from gradwire.exchanges.whiten import SecondMoments
from gradwire.tools.workload import GPT, Workload, WorkloadSettings, even_windows

WORKERS = 4
SETTINGS = WorkloadSettings(layers=2, width=128, heads=4, context=64, batch=4)
PEAK, WARMUP, LAST, DECAY = 1e-3, 15, 0.05, 0.01
"""The learning rate: its peak, the steps up to there, and the last one relative to the peak; and the weight decay."""
HELD_OUT = 384


class Task:
    """The model, and the gradients of all workers."""

    def __init__(self, seed: int, steps: int) -> None:
        self.steps = steps
        self.workers = [Workload(SETTINGS, seed=seed, rank=rank, size=WORKERS) for rank in range(1)]
        for rank in range(1, WORKERS):
            worker = object.__new__(Workload)
            vars(worker).update(vars(self.workers[0]), rank=rank)
            self.workers.append(worker)
        self.model: GPT = self.workers[0].model()
        self.named = list(self.model.named_parameters())
        self.params = [param for _, param in self.named]
        self.segments = segments_of(self.params, [name for name, _ in self.named])
        self.held_out = even_windows(self.workers[0].text.held_out, HELD_OUT, SETTINGS.context + 1)

    def learning_rate(self, step: int) -> float:
        """A linear warm-up and a cosine."""
        if step < WARMUP:
            return PEAK * (step + 1) / WARMUP
        done = (step + 1 - WARMUP) / max(self.steps - WARMUP, 1)
        return PEAK * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done)))

    def gradients(self, step: int) -> list[Tensor]:
        """The flat gradient of every worker."""
        found = []
        for worker in self.workers:
            grads = torch.autograd.grad(worker.loss(self.model, worker.batch(step)), self.params)
            found.append(torch.cat([grad.reshape(-1) for grad in grads]))
        return found

    def set_gradient(self, flat: Tensor) -> None:
        """Give every parameter its part."""
        for param, part in zip(self.params, flat.split([param.numel() for param in self.params]), strict=True):
            param.grad = part.view(param.shape)

    @torch.no_grad()
    def loss(self) -> float:
        """On text that is never trained on."""
        worker, parts = self.workers[0], self.held_out.split(64)
        return sum(float(worker.loss(self.model, part)) * len(part) for part in parts) / len(self.held_out)


def train_with_hook(task: Task, spec: str) -> float:
    """AdamW on gradients averaged by an exchange. Returns the bits per value that the codec needs."""
    exchange = gradwire.exchange(spec)
    optimizer = torch.optim.AdamW(task.params, lr=PEAK, betas=(0.9, 0.95), weight_decay=DECAY, fused=True)
    moments = SecondMoments(optimizer, dict(task.named))
    residuals: Sequence[Tensor] | None = None
    if exchange.takes_residual:
        residuals = [torch.zeros(sum(s.numel for s in task.segments)) for _ in range(WORKERS)]
    memory: dict[str, dict[str, Tensor]] = {}
    for step in range(task.steps):
        moment_of = moments.for_bucket(step)
        buckets = [Bucket(0, grad, task.segments, True, step, memory, moment_of) for grad in task.gradients(step)]
        found = exchange.reference(buckets, residuals)
        assert found is not None
        residuals = found.residuals
        task.set_gradient(found.mean)
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        optimizer.step()
    return math.nan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("/tmp/low_bits.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    kernels.load()
    for seed in args.seeds:
        for method in args.methods:
            began = time.time()
            task = Task(seed, args.steps)
            train_with_hook(task, method)
            row = dict(method=method, seed=seed, steps=args.steps, loss=task.loss(), seconds=time.time() - began)
            print(json.dumps(row), flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
