"""The emulated link and the cost model against shaped hosts: step time of every hook, three ways. Needs root.

    python benchmarks/emulated.py --ranks 2 --rates 100mbit 1gbit --bucket-mb 4 25 --out emulated.jsonl

shaped      ranks in network namespaces whose sending rate `tc` limits
emulated    the same ranks in the same namespaces with the limit gone, slowed down as by `gradwire.advisor.emulate`
predicted   by `gradwire.advisor.predict_step`, from the compute, the rehearsed hooks and the rate

Shaped and emulated rounds take turns, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradwire.advisor.compute import measure_compute
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import netns
from gradwire.advisor import EmulatedLink, Link, predict_step, rehearse
from gradwire.exchanges import EXCHANGES
from gradwire.tools.launch.launch import Report, run_ranks
from gradwire.tools.records.progress import progress
from rounds import BATCH, LAYERS, WIDTH

CLOSE = 0.10
"""How far the emulated step may be from the shaped one."""


def main() -> None:
    """Run all cells, print them, and fail if one is off."""
    args = parse_args()
    netns.check_usable()
    records = []
    for ranks in args.ranks:
        for bucket_mb in args.bucket_mb:
            for rate in args.rates:
                cell = run_cell(ranks, rate, bucket_mb, args)
                records += cell
                print_cell(ranks, rate, bucket_mb, cell)
    if args.out:
        Path(args.out).write_text("".join(json.dumps(record) + "\n" for record in records))
    off = [record for record in records if abs(record["emulated_ms"] / record["shaped_ms"] - 1) > CLOSE]
    print(f"\n{len(records) - len(off)} of {len(records)} emulated steps are within {CLOSE:.0%} of the shaped ones")
    sys.exit(bool(off))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], choices=list(netns.BURST))
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[4, 25], help="DDP's bucket_cap_mb")
    parser.add_argument("--hooks", nargs="+", default=list(EXCHANGES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="time a hook gets in a round")
    parser.add_argument("--out", help="JSON lines")
    return parser.parse_args()


def run_cell(ranks: int, rate: str, bucket_mb: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All hooks, on `ranks` hosts that shape their own sending."""
    job = {"bucket_mb": bucket_mb, "rate": rate} | {key: getattr(args, key) for key in ("hooks", "rounds", "seconds")}
    with netns.hosts(ranks, None) as names, progress(sys.stderr, f"{ranks} hosts, {rate}") as report:
        prefixes = [netns.on_host(name, rank) for rank, name in enumerate(names)]
        env = {"GLOO_SOCKET_IFNAME": netns.INTERFACE}
        rows = run_ranks("emulated:run", ranks, job, report=report, prefixes=prefixes, env=env, timeout_s=300)[0]
    return [{"ranks": ranks, "rate": rate, "bucket_mb": bucket_mb, **row} for row in rows]


def print_cell(ranks: int, rate: str, bucket_mb: float, cell: list[dict[str, Any]]) -> None:
    """A row a hook."""
    print(f"\n{ranks} hosts, {rate}: {LAYERS} x Linear({WIDTH}, {WIDTH}), buckets of {bucket_mb:g} MB; ms a step")
    print(f"{'hook':<12}{'shaped':>9}{'emulated':>10}{'':>7}{'predicted':>11}{'':>7}{'MB sent':>9}")
    for row in cell:
        parts = [(row[key], row[key] / row["shaped_ms"] - 1) for key in ("emulated_ms", "predicted_ms")]
        told = "".join(f"{value:>{width}.1f}{off:>+7.0%}" for (value, off), width in zip(parts, (10, 11), strict=True))
        print(f"{row['hook']:<12}{row['shaped_ms']:>9.1f}{told}{row['sent_bytes'] / 1e6:>9.2f}")
    sys.stdout.flush()


# -- one rank --------------------------------------------------------------------------------------------------------


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> list[dict[str, Any]]:
    """Measure every hook in turn, round after round, shaped and emulated by turns; and predict them all."""
    link = Link.parse(job["rate"])
    runs = [Run(hook, job["bucket_mb"], link) for hook in job["hooks"]]
    for index in range(-1, job["rounds"]):
        report(max(index, 0) / job["rounds"], "measuring")
        for run_, way in itertools.product(runs, ("shaped", "emulated")):
            shape(job["rate"] if way == "shaped" else None)
            run_.prepare(way, job["seconds"]) if index < 0 else run_.measure(way)
    shape(None)
    records = [run_.record() for run_ in runs]
    predict_all(records, runs[0], link, size)
    for run_ in runs:
        run_.hook.close()
    return records


def shape(rate: str | None) -> None:
    """Limit what this host sends, or let it go; all ranks together."""
    dist.barrier()
    queue = ["dev", netns.INTERFACE, "root"]
    subprocess.run(["tc", "qdisc", "del", *queue], stderr=subprocess.DEVNULL, check=False)  # there may be none
    if rate is not None:
        limit = ["tbf", "rate", rate, "burst", netns.BURST[rate], "latency", "200ms"]
        subprocess.run(["tc", "qdisc", "add", *queue, *limit], check=True)
    dist.barrier()


def predict_all(records: list[dict[str, Any]], any_run: Run, link: Link, size: int) -> None:
    """Adds what the cost model says."""
    any_run.hook.switch("noop")
    compute = measure_compute(any_run.hook, any_run.forward, steps=15, cores=1)
    layouts = [any_run.hook.layouts[index] for index in sorted(any_run.hook.layouts)]
    for record in records:
        traces = rehearse(gradwire.exchange(record["hook"]), layouts, size)
        record["predicted_ms"] = 1e3 * predict_step(traces, link, compute).step_s


class Run:
    """One hook on a model of its own."""

    def __init__(self, name: str, bucket_mb: float, link: Link) -> None:
        self.name, self.emulated = name, EmulatedLink(link)
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_mb)
        self.data = torch.randn(BATCH, WIDTH)
        self.hook = gradwire.register(self.model, name)
        self.times: dict[str, list[float]] = {"shaped": [], "emulated": []}
        self.steps = 1

    def prepare(self, way: str, seconds: float) -> None:
        """Warm up, and fit the number of steps to the time there is."""
        self.timed(way, 2)
        self.hook.reset_stats()
        self.steps = max(1, min(40, int(seconds / self.timed(way, 2))))

    def forward(self) -> Tensor:
        """The loss."""
        self.model.zero_grad()
        return self.model(self.data).square().mean()

    def timed(self, way: str, steps: int) -> float:
        """Seconds a step; the slowest rank counts."""
        self.hook.runner.lanes.hold = self.emulated.hold if way == "emulated" else None
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.forward().backward()
        taken = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken) / steps

    def measure(self, way: str) -> None:
        """One round."""
        self.times[way].append(self.timed(way, self.steps))

    def record(self) -> dict[str, Any]:
        """What goes back."""
        medians = {f"{way}_ms": 1e3 * statistics.median(times) for way, times in self.times.items()}
        return {"hook": self.name, **medians, "sent_bytes": self.hook.stats().sent_bytes}


if __name__ == "__main__":
    main()
