"""Predicted against measured step times on 2 to 8 ranks that share this machine. `record` needs root, `show` nothing.

    python benchmarks/predictions.py record --ranks 2 4 8 --rates 100mbit 1gbit --out predictions.jsonl
    python benchmarks/predictions.py show predictions.jsonl

`record` trains a model under all hooks in turns, on ranks in network namespaces whose sending rate `tc` limits, and
writes down the measured steps beside everything that predictions are made from: the compute, the rehearsed traces and
the probe. `show` predicts from such a file, so a change of the cost model is judged by the same measurements, without
the machine that they come from.

Goals: 90% of the predictions within 15%, all within 25%.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
import netns
from advice_tasks import TASKS
from gradwire.advisor import predict_step, rehearse
from gradwire.engine.gloo import THREADS
from gradwire.tools.launch.launch import Report, run_ranks
from gradwire.tools.measure.compute import Compute, measure_compute
from gradwire.tools.measure.crowd import run_and_wait_s
from gradwire.tools.measure.fit import Fit
from gradwire.tools.measure.probe import Probe, probe
from gradwire.tools.measure.rehearse import Send, Trace
from gradwire.tools.records.progress import progress
from gradwire.tools.records.records import quartiles

HOOKS = ("noop", "exact", "bf16", "int8", "int4", "int2", "topk", "powersgd")
CLOSE, FAR, MOST = 0.15, 0.25, 0.9
"""The goals: this part of all predictions within CLOSE, and all within FAR."""
COMPUTE = ("forward_s", "backward_s", "after_s", "cores", "crowd")
DISTURBED = 0.4
"""If other programs use a larger share of the machine than this, steps depend on them and not on the hook."""
STEPS, PROBE_ROUNDS = 4, 4
"""Steps of which the compute is the median; rounds between probes."""


# -- one rank ----------------------------------------------------------------------------------------------------------


def busy_s() -> float:
    """CPU seconds of all processes of this machine so far, without interrupts."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


class Training:
    """A model under one hook, which is switched as `gradwire advise` does it."""

    def __init__(self, workload: str, rank: int, size: int) -> None:
        self.task = TASKS[workload](rank, size)
        self.model = DistributedDataParallel(self.task.module)
        self.hook = gradwire.register(self.model, "exact")
        for _ in range(3):  # until DDP has its final buckets
            self.step()

    def step(self) -> None:
        """One of training."""
        self.task.forward(self.model).backward()
        self.task.after()

    def turn(self, hook: str, seconds: float) -> dict[str, Any]:
        """Steps for about so long, after two that do not count: the slowest rank's times, and CPU time per step."""
        self.hook.switch(hook)
        self.step()
        began = time.perf_counter()
        self.step()
        steps = max(2, min(20, round(seconds / self.over_ranks([time.perf_counter() - began], "amax")[0])))
        step_s = list[float]()

        def train() -> None:
            for _ in range(steps):
                began = time.perf_counter()
                self.step()
                step_s.append(time.perf_counter() - began)

        watched = self.watched(train, steps)
        return {"step_s": self.over_ranks(step_s, "amax"), **watched}

    def compute(self) -> dict[str, Any]:
        """What a step computes on this rank, with the mean CPU time of all ranks."""
        self.hook.switch("noop")
        self.step()
        found = list[Compute]()
        forward = lambda: self.task.forward(self.model)  # noqa: E731
        measure = lambda: measure_compute(self.hook, forward, self.task.after, steps=STEPS, cores=1)  # noqa: E731
        watched = self.watched(lambda: found.append(measure()), STEPS)
        return {**asdict(found[0]), **watched}

    def probe(self) -> dict[str, Any]:
        """The connection."""
        found = list[Probe]()
        watched = self.watched(lambda: found.append(probe(self.hook, pairs=False)))
        return {**found[0].as_dict(), **watched}

    def watched(self, act: Callable[[], None], steps: int = 1) -> dict[str, float]:
        """Per step, as a mean over the ranks: CPU time, and time in which threads were ready but had no core.

        `others` is the share of the machine that processes other than the ranks have used meanwhile.
        """
        dist.barrier()
        began, before = time.perf_counter(), (busy_s(), time.process_time(), *run_and_wait_s())
        act()
        wall_s, after = time.perf_counter() - began, (busy_s(), time.process_time(), *run_and_wait_s())
        spent = [ended - begun for begun, ended in zip(before, after, strict=True)]
        all_s, cpu_s, run_s, wait_s, wall_s = self.over_ranks([*spent, wall_s], "mean")
        others = max(all_s - self.hook.size * cpu_s, 0.0) / wall_s / (os.cpu_count() or 1)
        return {"cpu_s": cpu_s / steps, "run_s": run_s / steps, "wait_s": wait_s / steps, "others": others}

    def over_ranks(self, values: Sequence[float], how: str) -> list[float]:
        """The same on all ranks."""
        rows = self.hook.gather(torch.tensor(values, dtype=torch.float64))
        return getattr(rows, how)(0).tolist()  # type: ignore[no-any-return]


def shape(rate: str) -> None:
    """Limit what this rank's namespace sends."""
    how = f"rate {rate} burst {netns.BURST[rate]} latency 200ms"
    subprocess.run(f"tc qdisc replace dev {netns.INTERFACE} root tbf {how}".split(), check=True)


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> None:
    """Write a record for each rate: what was measured, and what predictions are made from."""
    training = Training(job["workload"], rank, size)
    layouts = [training.hook.layouts[index] for index in sorted(training.hook.layouts)]
    report(0.0, "rehearsing")
    traces = {name: as_lists(rehearse(gradwire.exchange(name), layouts, size)) for name in job["hooks"]}
    setting = {"workload": job["workload"], "ranks": size, "cores": os.cpu_count()}
    for at, rate in enumerate(job["rates"]):
        report(at / len(job["rates"]), f"measuring at {rate}")
        shape(rate)
        dist.barrier()
        record = {**setting, "rate": rate, "traces": traces, **measure(training, job)}
        if rank == 0:
            with Path(job["out"]).open("a") as file:
                file.write(json.dumps(record) + "\n")
    training.hook.close()


def as_lists(buckets: Sequence[Sequence[Trace]]) -> list[Any]:
    """Traces as JSON has them."""
    return [[asdict(trace) for trace in traces] for traces in buckets]


def measure(training: Training, job: Mapping[str, Any]) -> dict[str, Any]:
    """All hooks in turns, each round in another order, and with each round what predictions are made from."""
    began, rounds = time.perf_counter(), 0
    computes, probes, turns = [], [], {name: list[Any]() for name in job["hooks"]}
    while rounds < 2 or training.over_ranks([time.perf_counter() - began], "amax")[0] < job["minutes"] * 60:
        computes.append(training.compute())
        probes += [training.probe()] if rounds % PROBE_ROUNDS == 0 else []
        for name in random.Random(rounds).sample(job["hooks"], len(turns)):
            turns[name].append(training.turn(name, job["seconds"]))
        rounds += 1
    return {"computes": computes, "probes": probes, "turns": turns}


# -- all ranks ---------------------------------------------------------------------------------------------------------


def record(args: argparse.Namespace) -> None:
    """Append what all numbers of ranks measure to a file."""
    job = {key: getattr(args, key) for key in ("workload", "rates", "hooks", "minutes", "seconds")}
    job["out"] = str(Path(args.out).absolute())
    for ranks in args.ranks:
        with netns.hosts(ranks, args.rates[0]) as names, progress(sys.stderr, f"{ranks} ranks") as report:
            prefixes = [netns.on_host(name, rank) for rank, name in enumerate(names)]
            env = {"GLOO_SOCKET_IFNAME": netns.INTERFACE}
            run_ranks("predictions:run", ranks, job, report=report, prefixes=prefixes, env=env, timeout_s=300)


# -- predictions -------------------------------------------------------------------------------------------------------


def show(args: argparse.Namespace) -> None:
    """Print a table for each cell, and how many predictions are within the goals."""
    records = [json.loads(line) for path in args.files for line in Path(path).read_text().splitlines()]
    cells = [(show_cell(record), disturbance(record)) for record in records]
    off = [error for errors, others in cells if others <= DISTURBED for error in errors]
    if not off:
        sys.exit(f"in all cells other programs used more than {DISTURBED:.0%} of the machine: record again")
    close = sum(abs(error) <= CLOSE for error in off) / len(off)
    worst = max(off, key=abs)
    left_out = sum(others > DISTURBED for _, others in cells)
    print(f"\n{left_out} of {len(cells)} cells do not count: others used more than {DISTURBED:.0%} of the machine")
    print(f"{len(off)} predictions: {close:.0%} within {CLOSE:.0%}, the worst {worst:+.0%}")
    sys.exit(close < MOST or abs(worst) > FAR)


def show_cell(record: Mapping[str, Any]) -> list[float]:
    """The errors of the predictions of all hooks but `noop`."""
    compute, probed = compute_of(record), probe_of(quietest(record["probes"])[0])
    print(f"\n{record['workload']}, {record['ranks']} ranks on {record['cores']} cores, {record['rate']}; ms per step")
    print(f"{'hook':<10}{'measured':>10}  {'quartiles':<14}{'predicted':>10}{'':>7}{'CPU':>8}{'steps':>7}")
    errors = []
    for name, turns in record["turns"].items():
        quiet = quietest(turns)
        times = sorted(time_s for turn in quiet for time_s in turn["step_s"])
        measured_s, (low_s, high_s) = statistics.median(times), quartiles(times)
        traces = [[trace_of(trace) for trace in bucket] for bucket in record["traces"][name]]
        step_s = predict_step(traces, probed, compute, probed.cpu_cost, at_once=THREADS).step_s
        errors += [step_s / measured_s - 1] if name != "noop" else []
        cpu_s = statistics.median(turn["cpu_s"] for turn in quiet)
        ends = f"{1e3 * low_s:.0f}-{1e3 * high_s:.0f}"
        print(
            f"{name:<10}{1e3 * measured_s:>10.1f}  {ends:<14}{1e3 * step_s:>10.1f}{step_s / measured_s - 1:>+7.0%}"
            f"{1e3 * cpu_s:>8.1f}{len(times):>7}"
        )
    return errors


def disturbance(record: Mapping[str, Any]) -> float:
    """The share of the machine that other programs used in the turns that count."""
    return statistics.median(turn["others"] for turns in record["turns"].values() for turn in quietest(turns))


def quietest(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The half of the turns in which other processes used least of the machine, from the quietest on."""
    return sorted(turns, key=lambda turn: turn["others"])[: -(-len(turns) // 2)]


def compute_of(record: Mapping[str, Any]) -> Compute:
    """The median of the quiet ones."""
    found = quietest(record["computes"])
    middle = {name: statistics.median(each[name] for each in found) for name in COMPUTE}
    ready_s = (statistics.median(column) for column in zip(*(each["ready_s"] for each in found), strict=True))
    return Compute(ready_s=tuple(min(value, middle["backward_s"]) for value in ready_s), **middle)


def probe_of(found: Mapping[str, Any]) -> Probe:
    """The inverse of `Probe.as_dict`."""
    fits = {kind: {name: Fit(**values) for name, values in found[kind].items()} for kind in ("fits", "cpu_cost")}
    return Probe(size=found["size"], speeds={}, hosts=tuple(found["hosts"]), **fits)


def trace_of(found: Mapping[str, Any]) -> Trace:
    """The inverse of `dataclasses.asdict`."""
    return Trace(tuple(Send(**send) for send in found["sends"]), found["work_s"])


def main() -> None:
    """`record` or `show`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    option = verbs.add_parser("record").add_argument
    option("--ranks", type=int, nargs="+", default=[2, 4, 8])
    option("--rates", nargs="+", default=["100mbit", "1gbit"], choices=list(netns.BURST))
    option("--workload", default="gpt", choices=list(TASKS))
    option("--hooks", nargs="+", default=list(HOOKS))
    option("--minutes", type=float, default=1.0, help="for each rate and number of ranks, besides the start")
    option("--seconds", type=float, default=0.4, help="time a hook gets in a round")
    option("--out", required=True, help="JSON lines; what is there stays")
    verbs.add_parser("show").add_argument("files", nargs="+")
    args = parser.parse_args()
    record(args) if args.verb == "record" else show(args)


if __name__ == "__main__":
    main()
