"""How good the advice is: predicted against measured step time of every hook, and `auto` against all. Needs root.

    python benchmarks/advice.py --workload gpt mlp --rates 100mbit 1gbit 10gbit none --out advice.jsonl

Ranks sit in network namespaces whose sending rate `tc` limits, a core each. All hooks of a cell run in the same
processes, each on a model of its own, one after the other, round after round, each round in another order; so does
`auto`, once it has made up its mind. Predictions are made in between, from the compute, the rehearsed hooks and a probe
of the link: as with `gradwire advise`, nobody tells them the rate. Then what `auto` took meets the best hook in
hindsight, bf16 and DDP without a hook once more, in more and shorter rounds: who was best by luck in the first ones is
no longer. Hooks do so on one and the same model, as two models of a kind may differ by 3% by where their memory lies.

Goals: predictions within 15%; `auto` within 5% of the best hook whose error is within its limit, and at most 3% slower
than DDP without a hook and than bf16. What a round says is compared with what the same round says of another hook.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
import netns
from advice_table import BASES, best, print_cell, print_summary
from advice_tasks import TASKS, Task
from gradwire.advisor import predict_step, rehearse
from gradwire.auto.settings import Auto
from gradwire.exchanges import EXCHANGES
from gradwire.tools.launch.launch import Report, run_ranks
from gradwire.tools.measure.compute import Compute, measure_compute
from gradwire.tools.measure.probe import Probe, probe
from gradwire.tools.measure.rehearse import BucketLayout
from gradwire.tools.records.progress import progress

PREDICT_ROUNDS = 3
"""Rounds between predictions."""
SETTLE_STEPS = 1500
"""`auto` decides before."""
DUEL_STEPS, DUEL_S, DUEL_ROUNDS = 2, 90.0, 60
"""Steps of a turn, besides its first one; and at most so much time and so many rounds."""


def main() -> None:
    """Run all cells, print them, and say how many goals are met."""
    args = parse_args()
    netns.check_usable()
    cells = []
    for workload in args.workload:
        for rate in args.rates:
            cells.append({"workload": workload, "rate": rate, "ranks": args.ranks, **run_cell(workload, rate, args)})
            print_cell(cells[-1])
            if args.out:
                Path(args.out).write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    sys.exit(not print_summary(cells))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rates", nargs="+", default=[*netns.BURST, "none"], choices=[*netns.BURST, "none"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--bucket-mb", type=float, help="DDP's bucket_cap_mb; by default what each hook makes of its default"
    )
    parser.add_argument("--hooks", nargs="+", default=list(EXCHANGES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.3, help="time a hook gets in a round")
    parser.add_argument("--out", help="JSON lines")
    return parser.parse_args()


def run_cell(workload: str, rate: str, args: argparse.Namespace) -> dict[str, Any]:
    """All hooks, on hosts that shape their own sending."""
    job = {"workload": workload} | {key: getattr(args, key) for key in ("bucket_mb", "hooks", "rounds", "seconds")}
    shaped = None if rate == "none" else rate
    with netns.hosts(args.ranks, shaped) as names, progress(sys.stderr, f"{workload}, {rate}") as report:
        prefixes = [netns.on_host(name, rank) for rank, name in enumerate(names)]
        env = {"GLOO_SOCKET_IFNAME": netns.INTERFACE}
        told: dict[str, Any] = run_ranks(
            "advice:run", args.ranks, job, report=report, prefixes=prefixes, env=env, timeout_s=600
        )[0]
    return told


# -- one rank ----------------------------------------------------------------------------------------------------------


class Run:
    """One hook on a model of its own."""

    def __init__(self, name: str, task: Task, bucket_mb: float | None) -> None:
        self.name, self.task = name, task
        self.model = DistributedDataParallel(task.module, bucket_cap_mb=bucket_mb)
        self.hook = None if name == "plain" else gradwire.register(self.model, name)
        self.times: list[float] = []
        self.steps, self.error = 1, 0.0
        self.predicted: list[float] = []
        self.busy: list[float] = []

    def step(self) -> None:
        """One of training."""
        self.task.forward(self.model).backward()
        self.task.after()

    def first_step(self, exact: Tensor | None) -> Tensor:
        """All models are still the same, so the error of the mean can be told; returns the averaged gradient."""
        self.step()
        grads = torch.cat([param.grad.flatten() for param in self.model.parameters() if param.grad is not None])
        if exact is not None:
            self.error = float((grads - exact).norm() / exact.norm())
        return grads

    def settle(self) -> tuple[int, float]:
        """Steps until `auto` has decided, and their seconds."""
        began = time.perf_counter()
        for count in range(SETTLE_STEPS):
            self.step()
            if self.hook is None or self.hook.pilot is None or self.hook.pilot.reason != "measuring":
                return count + 1, time.perf_counter() - began
        raise SystemExit(f"auto has not decided after {SETTLE_STEPS} steps")

    def timed(self, steps: int) -> float:
        """Seconds of the median step; of each step the slowest rank counts.

        The first one does not: it finds the caches full of another model.
        """
        dist.barrier()
        self.step()
        times, busy = [time.perf_counter()], time.process_time()
        for _ in range(steps):
            self.step()
            times.append(time.perf_counter())
        self.busy.append((time.process_time() - busy) / steps)
        taken = torch.tensor(times, dtype=torch.float64).diff()
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken.median())

    def row(self) -> dict[str, Any]:
        """What goes back."""
        return {
            "hook": self.name,
            "step_ms": [1e3 * value for value in self.times],
            "predicted_ms": 1e3 * statistics.median(self.predicted) if self.predicted else None,
            "busy_ms": 1e3 * statistics.median(self.busy),
            "error": self.error,
        }


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure every hook in turn, round after round, and predict them all."""
    names = dict.fromkeys([*BASES, *job["hooks"], "auto"])
    runs = [Run(name, TASKS[job["workload"]](rank, size), job["bucket_mb"]) for name in names]
    prepare(runs, job["seconds"], report)
    report(0.2, "letting auto decide")
    steps, seconds = runs[-1].settle()
    pick, reason = str(hook_of(runs[-1]).exchange), hook_of(runs[-1]).stats().reason
    runs[-1].steps = fitting(runs[-1], job["seconds"])
    spare = next(each for each in runs if each.name == "noop")
    for index in range(job["rounds"]):
        report(0.4 + 0.5 * index / job["rounds"], "measuring")
        for each in random.Random(index).sample(runs, len(runs)):  # who comes before whom must not matter
            each.times.append(each.timed(each.steps))
        if index % PREDICT_ROUNDS == 0:
            found = probe(hook_of(spare), pairs=False)
            predict_all(runs, spare, found)
    told = {"hooks": [each.row() for each in runs], "max_error": Auto().max_error, "rounds": job["rounds"]}
    report(0.9, "auto against the best")
    told["duel_ms"] = duel(runs[-1], runs[0], pick, best(told))
    for each in runs:
        if each.hook is not None:
            each.hook.close()
    return {**told, "probe": found.as_dict(), "auto_steps": steps, "auto_s": seconds, "auto_reason": reason}


def duel(auto: Run, plain: Run, pick: str, best_hook: str) -> dict[str, list[float]]:
    """Milliseconds of each turn of what `auto` took and its rivals, on its model."""
    rivals = list(dict.fromkeys([pick, best_hook, *BASES]))
    took: dict[str, list[float]] = {name: [] for name in rivals}
    index, began = 0, time.perf_counter()
    while index < 6 or (index < DUEL_ROUNDS and agreed_s(began) < DUEL_S):
        for name in random.Random(index).sample(rivals, len(rivals)):
            if name != "plain":
                hook_of(auto).switch(name)
            took[name].append(1e3 * (plain if name == "plain" else auto).timed(DUEL_STEPS))
        index += 1
    return {"auto": took[pick], **took}


def agreed_s(began: float) -> float:
    """Seconds since, the same on all ranks."""
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def prepare(runs: Sequence[Run], seconds: float, report: Report) -> None:
    """Warm up, measure errors, and fit the number of steps to the time there is. The first run is exact."""
    exact = None
    for index, each in enumerate(runs):
        report(0.2 * index / len(runs), f"warming up {each.name}")
        exact = each.first_step(exact) if exact is None else (each.first_step(exact), exact)[1]
        if each.name != "auto":
            each.steps = fitting(each, seconds)


def fitting(run: Run, seconds: float) -> int:
    """Steps that fit into so many seconds, but at least two; the same on all ranks. Warms up as well."""
    return max(2, min(40, round(seconds / run.timed(2))))


def hook_of(run: Run) -> gradwire.Hook:
    """Of a run that is not `plain`."""
    assert run.hook is not None
    return run.hook


def layouts_of(hook: gradwire.Hook) -> list[BucketLayout]:
    """Its buckets, in order."""
    return [hook.layouts[index] for index in sorted(hook.layouts)]


def predict(hook: gradwire.Hook, wire: Probe, compute: Compute, came_s: Mapping[str, float]) -> float:
    """Seconds of a step in the hook's own buckets; `came_s` says when the gradient of each parameter is there."""
    layouts = layouts_of(hook)
    ready_s = itertools.accumulate((max(came_s[part.name] for part in layout) for layout in layouts), max)
    traces = rehearse(hook.exchange, layouts, hook.size)
    return predict_step(traces, wire, replace(compute, ready_s=tuple(ready_s)), wire.cpu_cost).step_s


def predict_all(runs: Sequence[Run], spare: Run, wire: Probe) -> None:
    """Adds what the cost model says at this time; the slowest rank counts."""
    hook = hook_of(spare)
    compute = measure_compute(hook, lambda: spare.task.forward(spare.model), spare.task.after, cores=1)
    pairs = zip(layouts_of(hook), compute.ready_s, strict=True)
    came_s = {part.name: ready_s for layout, ready_s in pairs for part in layout}
    asked = [each for each in runs if each.name not in ("plain", "auto")]
    mine = [predict(hook_of(each), wire, compute, came_s) for each in asked]
    slowest = hook.gather(torch.tensor(mine, dtype=torch.float64)).amax(0).tolist()
    for each, step_s in zip(asked, slowest, strict=True):
        each.predicted.append(step_s)


if __name__ == "__main__":
    main()
