"""Does training with 2 bits and less reach the loss of exact averaging? Simulated workers in one process.

    python benchmarks/low_bits.py --methods exact int2 int2:whiten=true onebit --seeds 100 101 102 --steps 500
    python benchmarks/low_bits.py --table

The model is gradwire's built-in byte-level GPT with 0.47M parameters, trained with AdamW on 4 workers that see
different data. The workers share one copy of the parameters, as replicas do, and the averages are the exchanges'
references, which `Hook.verify()` compares real averages with, bit for bit. So the loss does not depend on the load of
the machine. Runs that the file has already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.exchanges.base import Exchange
from gradwire.exchanges.bucket import Bucket, Segment, segments_of
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.low_rank import LowRank
from gradwire.exchanges.whiten import SecondMoments
from gradwire.optim.one_bit import Kind, OneBitAdamW
from gradwire.tools.workload import GPT, Workload, WorkloadSettings, even_windows

WORKERS = 4
SETTINGS = WorkloadSettings(layers=2, width=128, heads=4, context=64, batch=4)
PEAK, WARMUP, LAST = 1e-3, 15, 0.05
"""The learning rate: its peak, the steps up to there, and the last one relative to the peak."""
ADAM = {"lr": PEAK, "betas": (0.9, 0.95), "weight_decay": 0.01}
HELD_OUT = 384
EXACT_STEPS = 15
"""The first steps of whitening, which average exactly. Bits per value are those of the steps after them."""


class Task:
    """The model, and the gradients of all workers."""

    def __init__(self, seed: int, steps: int) -> None:
        self.steps = steps
        first = Workload(SETTINGS, seed=seed, rank=0, size=WORKERS)
        self.workers = [first]
        for rank in range(1, WORKERS):  # they share the text, which takes a while to read
            worker = object.__new__(Workload)
            vars(worker).update(vars(first), rank=rank)
            self.workers.append(worker)
        self.model: GPT = first.model()
        self.named = list(self.model.named_parameters())
        self.params = [param for _, param in self.named]
        self.segments = segments_of(self.params, [name for name, _ in self.named])
        self.held_out = even_windows(first.text.held_out, HELD_OUT, SETTINGS.context + 1)

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


def bits_of(exchange: Exchange, segments: Sequence[Segment], step: int) -> tuple[float, float]:
    """Bits per value of a message: of the tensors that are encoded, and of all, exempt ones in float32 included."""
    total = sum(segment.numel for segment in segments)
    if isinstance(exchange, LowRank) and step >= exchange.warmup:
        layout = exchange.lay_out(Bucket(0, torch.empty(0), tuple(segments), is_last=True))
        exempt = sum(numel for _, numel in layout.rest)
        thin = (layout.values - exempt) / (2 if exchange.sides == "one" else 1)
        return 32.0 * thin / (total - exempt), 32.0 * (thin + exempt) / total
    if not isinstance(exchange, Coded) or step < exchange.warmup:
        return 32.0, 32.0
    runs = exchange.runs(Bucket(0, torch.empty(0), tuple(segments), is_last=True))
    coded = sum(run.numel for run in runs if not run.exempt)
    wire = 8.0 * sum(exchange.codec.wire_bytes(run.numel) for run in runs if not run.exempt)
    return wire / coded, (wire + 32.0 * (total - coded)) / total


def train_with_hook(task: Task, spec: str) -> list[tuple[float, float]]:
    """AdamW on gradients averaged by an exchange. Returns the bits of every step."""
    exchange = gradwire.exchange(spec)
    optimizer = torch.optim.AdamW(task.params, fused=True, **ADAM)  # type: ignore[arg-type]
    moments, bits = SecondMoments(optimizer, dict(task.named)), []
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
        optimizer.param_groups[0]["lr"] = task.learning_rate(step)
        optimizer.step()
        bits.append(bits_of(exchange, task.segments, step))
    return bits


class Simulated(OneBitAdamW):
    """Averages the gradients of simulated workers."""

    def __init__(self, task: Task, **options: Any) -> None:
        super().__init__(task.params, **ADAM, **options)  # type: ignore[arg-type]
        self.task, self.bits = task, list[tuple[float, float]]()
        self.residuals = [torch.zeros(sum(s.numel for s in task.segments)) for _ in range(WORKERS)]
        self.moments = SecondMoments(self, dict(task.named))

    def _average(self, kind: Kind) -> list[Tensor]:
        (part,), exchange, step = self.parts(), self._exchanges[kind], self._count
        with torch.enable_grad():
            gradients = self.task.gradients(step)
        flats = [part.message(kind, flat) for flat in gradients]
        moment_of = self.moments.for_bucket(step)
        buckets = [Bucket(0, flat, self.task.segments, True, step, None, moment_of) for flat in flats]
        found = exchange.reference(buckets, self.residuals if exchange.takes_residual else None)
        assert found is not None
        self.residuals = list(found.residuals or self.residuals)
        self.bits.append(bits_of(exchange, self.task.segments, step))
        return [found.mean]


def train_one_bit(task: Task, text: str) -> list[tuple[float, float]]:
    """OneBitAdamW with options such as `refresh=8`. Returns the bits of every step."""
    options: dict[str, Any] = {"warmup": 30}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        options[key] = int(value) if value.isdigit() else value
    optimizer = Simulated(task, **options)
    for step in range(task.steps):
        optimizer.param_groups[0]["lr"] = task.learning_rate(step)
        optimizer.step()
    return optimizer.bits


def run(method: str, seed: int, steps: int) -> dict[str, Any]:
    """One training run."""
    began, task = time.perf_counter(), Task(seed, steps)
    name, _, options = method.partition(":")
    bits = train_one_bit(task, options) if name == "onebit" else train_with_hook(task, method)
    coded, whole = (statistics.fmean(column) for column in zip(*bits[EXACT_STEPS:], strict=True))
    late = statistics.fmean(coded for coded, _ in bits[steps // 2 :])
    seconds = time.perf_counter() - began
    row = {"method": method, "seed": seed, "steps": steps, "loss": task.loss(), "seconds": round(seconds, 1)}
    return {**row, "bits": coded, "bits_with_exempt": whole, "bits_in_second_half": late}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The gap to exact, paired by seed, in units of the spread between seeds."""
    lines = ["| steps | method | bits | seeds | mean gap | in seed s.d. | worst | gaps |", "|---" * 8 + "|"]
    for steps in sorted({row["steps"] for row in rows}):
        exact = {row["seed"]: row["loss"] for row in rows if (row["method"], row["steps"]) == ("exact", steps)}
        spread = statistics.stdev(exact.values()) if len(exact) > 1 else math.nan
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [r for r in rows if (r["method"], r["steps"]) == (method, steps) and r["seed"] in exact]
            if own and method != "exact":
                gaps = [row["loss"] - exact[row["seed"]] for row in own]
                mean, bits = statistics.fmean(gaps), statistics.fmean(row["bits"] for row in own)
                each = " ".join(f"{gap:+.3f}" for gap in gaps)
                lines.append(
                    f"| {steps} | `{method}` | {bits:.2f} | {len(own)} | {mean:+.4f} | {mean / spread:+.2f} of "
                    f"{spread:.3f} | {max(gaps):+.3f} | {each} |"
                )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=["exact", "int2", "int2:whiten=true", "onebit"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[100, 101, 102])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("low_bits.jsonl"))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.table:
        print(table(rows))
        return
    torch.set_num_threads(1)
    kernels.load()
    done = {(row["method"], row["seed"], row["steps"]) for row in rows}
    for seed in args.seeds:
        for method in args.methods:
            if (method, seed, args.steps) not in done:
                row = run(method, seed, args.steps)
                print(json.dumps(row), flush=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
