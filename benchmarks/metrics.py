"""What do metrics cost? CPU time of a training step with and without `gradwire.metrics.record`, in turns.

    python benchmarks/metrics.py --hook int4:feedback=true --every 50

Two numbers are printed. The ratio compares blocks of steps with and without metrics, pair by pair, with its quartiles:
other processes on the machine make it uncertain by a percent. The share is exact: the CPU time inside of the recorder,
measured by the clock of each thread, divided by that of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.metrics import JSONL, Recorder
from gradwire.testing import spawn_ranks


class Timed(Recorder):
    """A recorder that measures its own CPU time."""

    spent_s = 0.0

    def before_mean(self, bucket: gradwire.Bucket, first: bool) -> None:
        """In the thread that runs backward."""
        began = time.thread_time()
        super().before_mean(bucket, first)
        self.spent_s += time.thread_time() - began

    def after_mean(self, bucket: gradwire.Bucket) -> None:
        """In a thread of the engine. (Two threads that add at the same moment lose a little.)"""
        began = time.thread_time()
        super().after_mean(bucket)
        self.spent_s += time.thread_time() - began

    def _end(self) -> None:
        began = time.thread_time()
        super()._end()
        self.spent_s += time.thread_time() - began


def work(rank: int, size: int, args: argparse.Namespace, folder: str) -> tuple[list[float], float, float]:
    """The ratios of the pairs, the CPU time per step, and that of the recorder per step, all of this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(args.layers))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook = gradwire.register(model, args.hook)
    inputs = torch.randn(args.batch, 1024)

    def block(count: int) -> float:
        began = time.process_time()
        for _ in range(count):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return time.process_time() - began

    block(5)
    ratios, steps_s, spent_s, count = [], [], 0.0, args.every
    for pair in range(args.pairs):
        taken = {}
        for with_metrics in (True, False) if pair % 2 else (False, True):
            if with_metrics:
                hook.steps = 0
                timed = Timed(hook, [JSONL(Path(folder, "run.jsonl"))], args.every)
            taken[with_metrics] = block(count)
            if with_metrics:
                timed.close()
                spent_s += timed.spent_s
        ratios.append(taken[True] / taken[False])
        steps_s.append(taken[True] / count)
    hook.close()
    return ratios, statistics.mean(steps_s), spent_s / (count * args.pairs)


def main() -> None:
    """Run the pairs on 2 ranks; rank 0 writes, so its numbers count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="int8")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ratios, step_s, spent_s = spawn_ranks(2, work, args, folder, timeout_s=3600)[0]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{args.hook}, {args.layers} x Linear(1024, 1024), a record every {args.every} steps, {args.pairs} pairs")
    print(f"CPU time with / without metrics: {middle:.4f}, quartiles {low:.4f} to {high:.4f}")
    print(f"CPU time of the recorder: {1e6 * spent_s:.0f} us of {1e3 * step_s:.1f} ms per step, {spent_s / step_s:.3%}")


if __name__ == "__main__":
    main()
