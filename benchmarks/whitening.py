"""What of `int2:whiten=true` costs the loss, and what would lower it? Variants that the library does not have.

    python benchmarks/whitening.py exact "" lr=1.12 feedback=1 exact_v=1 predict=0.7 --seeds 1 2 3 4 --steps 150
    python benchmarks/whitening.py --table

Workers are simulated as in `low_bits.py`, on a smaller model (width 64, 32 bytes of context), so that a run of 150
steps takes about 5 seconds of one idle core. "" is `int2:whiten=true`, with two-shot averages and levels written out
here. These seeds are for tuning: what wins must be confirmed with `low_bits.py` on others.

A variant is a list of `option=number`, separated by commas:

    warmup    the number of exact steps (15; 100000 for exact averaging with other options)
    lr        a factor of the learning rate
    feedback  error feedback on both roundings
    exact_v   the second moment is that of the exact mean, which no rank knows
    predict   workers send the difference of their gradient to this fraction of the momentum, which all ranks hold
    pull      the mean is moved by this fraction towards the momentum
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import low_bits
from gradwire.tools.workload import WorkloadSettings
from low_bits import WORKERS, Task

BETA1, BETA2, EPS, DECAY, FLOOR = 0.9, 0.95, 1e-8, 0.01, 0.001
BLOCK, EDGE, LOW, HIGH = 64, 0.9816, 0.4528, 1.5104
"""Lloyd-Max levels for 2 bits, in units of the block's rms."""
DEFAULTS = {"warmup": 15, "lr": 1, "feedback": 0, "exact_v": 0, "predict": 0, "pull": 0}


def two_bits(values: Tensor) -> Tensor:
    """Encode and decode, with the scale of each block that fits best."""
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    size, rms = blocks.abs(), blocks.square().mean(-1, keepdim=True).sqrt()
    level = torch.where(size > EDGE * rms, HIGH, LOW)
    scale = (size * level).sum(-1, keepdim=True) / level.square().sum(-1, keepdim=True)
    return (level * scale).copysign(blocks).reshape(values.shape)


class Variant:
    """AdamW on whitened means of two bits, with all parameters in one flat tensor."""

    def __init__(self, task: Task, options: dict[str, float]) -> None:
        self.task, self.options = task, options
        self.values = torch.cat([param.detach().reshape(-1) for param in task.params])
        self.m, self.v = torch.zeros_like(self.values), torch.zeros_like(self.values)
        sizes, coded = [param.numel() for param in task.params], list[Tensor]()
        for param, part, place in zip(
            task.params, self.values.split(sizes), torch.arange(len(self.values)).split(sizes), strict=True
        ):
            param.data = part.view(param.shape)
            if param.dim() > 1 and param.numel() >= 1024:
                coded.append(place)
        self.coded, self.sizes = torch.cat(coded), list(map(len, coded))
        self.kept_W, self.kept = torch.zeros(WORKERS, len(self.coded)), torch.zeros(len(self.coded))

    def step(self, step: int) -> None:
        """Average, and move the parameters."""
        grads_W = torch.stack(self.task.gradients(step))
        exact = mean = grads_W.mean(0)
        if step >= self.options["warmup"]:
            mean = exact.clone()
            mean[self.coded] = self.averaged(grads_W[:, self.coded], self.m[self.coded] / (1 - BETA1**step))
        squared = (exact if self.options["exact_v"] else mean).square()
        self.m.mul_(BETA1).add_(mean, alpha=1 - BETA1)
        self.v.mul_(BETA2).add_(squared, alpha=1 - BETA2)
        rate = self.task.learning_rate(step) * self.options["lr"]
        root = (self.v / (1 - BETA2 ** (step + 1))).sqrt() + EPS
        self.values.mul_(1 - rate * DECAY).sub_(self.m / (1 - BETA1 ** (step + 1)) / root, alpha=rate)

    def averaged(self, grads_W: Tensor, momentum: Tensor) -> Tensor:
        """The mean of the encoded tensors: each worker's share and their sum are rounded."""
        feedback, predict, pull = (self.options[name] for name in ("feedback", "predict", "pull"))
        moments = self.v[self.coded].split(self.sizes)
        root = torch.cat([(part + FLOOR * part.mean()).sqrt() for part in moments]).clamp_min(1e-20)
        due_W = (grads_W - predict * momentum + feedback * self.kept_W) / root
        sent_W = two_bits(due_W)
        due = sent_W.mean(0) + feedback * self.kept / root
        sent = two_bits(due)
        self.kept_W, self.kept = (due_W - sent_W) * root, (due - sent) * root
        mean = sent * root + predict * momentum
        return mean + pull * (momentum - mean)


def run(variant: str, seed: int, steps: int) -> dict[str, Any]:
    """One training run."""
    given = "warmup=100000" if variant == "exact" else variant
    options = {
        **DEFAULTS,
        **{key: float(value) for key, value in (item.split("=") for item in given.split(",") if item)},
    }
    if unknown := options.keys() - DEFAULTS.keys():
        raise SystemExit(f"unknown options {', '.join(unknown)}; there are {', '.join(DEFAULTS)}")
    began, task = time.perf_counter(), Task(seed, steps)
    trained = Variant(task, options)
    for step in range(steps):
        trained.step(step)
    seconds = round(time.perf_counter() - began, 1)
    return {"method": variant, "seed": seed, "steps": steps, "loss": task.loss(), "seconds": seconds}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The gap to exact, paired by seed, with its standard error."""
    lines = ["| steps | variant | seeds | mean gap | standard error | gaps |", "|---" * 6 + "|"]
    for steps in sorted({row["steps"] for row in rows}):
        exact = {row["seed"]: row["loss"] for row in rows if (row["method"], row["steps"]) == ("exact", steps)}
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [r for r in rows if (r["method"], r["steps"]) == (method, steps) and r["seed"] in exact]
            gaps = [row["loss"] - exact[row["seed"]] for row in own]
            if len(gaps) > 1 and method != "exact":
                error = statistics.stdev(gaps) / len(gaps) ** 0.5
                each = " ".join(f"{gap:+.3f}" for gap in gaps)
                name = method or "int2:whiten=true"
                lines.append(
                    f"| {steps} | {name} | {len(gaps)} | {statistics.fmean(gaps):+.4f} | {error:.4f} | {each} |"
                )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("whitening.jsonl"))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.table:
        print(table(rows))
        return
    torch.set_num_threads(1)
    low_bits.SETTINGS = WorkloadSettings(layers=2, width=64, heads=4, context=32, batch=4)
    done = {(row["method"], row["seed"], row["steps"]) for row in rows}
    for variant in args.variants:
        for seed in args.seeds:
            if (variant, seed, args.steps) not in done:
                row = run(variant, seed, args.steps)
                print(json.dumps(row), flush=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
