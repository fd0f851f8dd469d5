"""`gradwire simulate` against measured runs: step time of hooks on 2, 4 and 8 local ranks over an emulated link.

    python benchmarks/simulate.py --ranks 2 4 8 --links 100mbit 1gbit --out simulate.jsonl

measured    the built-in GPT, ranks as processes of this machine; the slowest rank's median step
own         predicted from the model's own buckets, from when each was full in a measured backward pass, and from the
            processor time that collectives take here
simulated   predicted as `gradwire simulate` does, from the number of parameters and the time of a step alone

Local ranks share the cores, and the model is told so. The compute is that of a step under `noop` while all ranks train,
so it holds its share of the cores already. Hooks are rehearsed alone, and processor time is counted as if alone: where
there are more ranks than cores, both take ranks / cores times as long (`codec_speed` of a Scene).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.advisor import Compute, EmulatedLink, Link, predict_step, rehearse
from gradwire.exchanges.bucket import segments_of
from gradwire.tools.launch.launch import Report, cores, run_ranks
from gradwire.tools.measure.compute import measure_compute
from gradwire.tools.measure.fit import Fit
from gradwire.tools.measure.probe import probe
from gradwire.tools.measure.simulate import Scene, faster, one_thread, simulate
from gradwire.tools.records.progress import progress
from gradwire.tools.workload import Workload, WorkloadSettings

HOOKS = ("noop", "exact", "bf16", "int8", "int4", "powersgd")
WAYS = ("own", "simulated")
CLOSE = 0.15
"""How far a prediction may be from the measured step."""


def main() -> None:
    """Run all cells, print them, and fail if a prediction is off."""
    args = parse_args()
    records = []
    for ranks in args.ranks:
        found = measured(ranks, args)
        rows = predicted(found, ranks)
        for link in args.links:
            print_rows(ranks, link, [row for row in rows if row["link"] == link])
        records += rows
    if args.out:
        Path(args.out).write_text("".join(json.dumps(record) + "\n" for record in records))
    for way in WAYS:
        off = [abs(error(record, way)) for record in records if record["hook"] != "noop"]
        near = sum(value <= CLOSE for value in off)
        print(
            f"{way}: {near} of {len(off)} within {CLOSE:.0%}, median {statistics.median(off):.0%}, worst {max(off):.0%}"
        )
    sys.exit(any(abs(error(record, "own")) > CLOSE for record in records if record["hook"] != "noop"))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--hooks", nargs="+", default=list(HOOKS), help="noop and exact always come too")
    parser.add_argument("--bucket-mb", type=float, default=3.0, help="DDP's bucket_cap_mb: a block of the GPT")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="time a hook gets in a round")
    parser.add_argument("--out", help="JSON lines")
    args = parser.parse_args()
    args.hooks = list(dict.fromkeys(["noop", "exact", *args.hooks]))
    return args


def error(record: Mapping[str, Any], way: str) -> float:
    """Of a prediction, relative."""
    return float(record[f"{way}_s"] / record["measured_s"] - 1)


def print_rows(ranks: int, link: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row a hook."""
    print(f"\n{ranks} ranks on {cores()} cores, {link}; ms a step")
    print(f"{'hook':<12}{'measured':>10}{'own':>10}{'':>7}{'simulated':>11}{'':>7}")
    for row in rows:
        told = [(1e3 * row[f"{way}_s"], error(row, way)) for way in WAYS]
        ways = "".join(f"{value:>{width}.1f}{off:>+7.0%}" for (value, off), width in zip(told, (10, 11), strict=True))
        print(f"{row['hook']:<12}{1e3 * row['measured_s']:>10.1f}{ways}")
    sys.stdout.flush()


# -- prediction ------------------------------------------------------------------------------------------------------


def predicted(found: Mapping[str, Any], ranks: int) -> list[dict[str, Any]]:
    """A record a link and hook, predicted both ways. No rank runs meanwhile."""
    share = cores() / ranks
    layouts = [
        segments_of([torch.empty(shape, device="meta") for _, shape in bucket], [name for name, _ in bucket])
        for bucket in found["buckets"]
    ]
    alone_s = statistics.median(hooks["noop"] for hooks in found["measured_s"].values())
    scene = Scene(
        ranks=(ranks,),
        links=tuple(map(Link.parse, found["measured_s"])),
        compute_s=alone_s,
        params=sum(part.numel for layout in layouts for part in layout),
        cores=max(share, 1.0),
        codec_speed=min(share, 1.0),
    )
    compute = compute_of(found["compute"], alone_s, scene.cores)
    cpu_cost = {name: slower(Fit(**told), scene.codec_speed) for name, told in found["cpu_cost"].items()}
    hooks = list(next(iter(found["measured_s"].values())))
    records = []
    for hook, forecast in zip(hooks, simulate(hooks, scene), strict=True):
        with one_thread():
            traces = faster(rehearse(gradwire.exchange(hook), layouts, ranks), scene.codec_speed)
        for at, (link, measured_s) in enumerate(found["measured_s"].items()):
            own_s = predict_step(traces, scene.links[at], compute, cpu_cost).step_s
            told = {"own_s": own_s, "simulated_s": forecast.predictions[at][0].step_s, "measured_s": measured_s[hook]}
            records.append({"ranks": ranks, "link": link, "hook": hook, **told})
    return records


def compute_of(told: Mapping[str, Any], step_s: float, cores: float) -> Compute:
    """What one rank saw, in the proportions of a step of the slowest rank."""
    factor = step_s / (told["forward_s"] + told["backward_s"] + told["after_s"])
    parts = {name: factor * told[name] for name in ("forward_s", "backward_s", "after_s")}
    return Compute(**parts, ready_s=tuple(factor * ready_s for ready_s in told["ready_s"]), cores=cores)


def slower(fit: Fit, speed: float) -> Fit:
    """On a part of a core."""
    return Fit(fit.alpha_s / speed, fit.bytes_per_s * speed, fit.r_squared)


# -- the ranks -------------------------------------------------------------------------------------------------------


def measured(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Step times by link and hook, the compute alone, and the buckets, as rank 0 has them."""
    job = {key: getattr(args, key) for key in ("links", "hooks", "bucket_mb", "rounds", "seconds")}
    with progress(sys.stderr, f"{ranks} ranks") as report:
        found: dict[str, Any] = run_ranks("simulate:run", ranks, job, report=report, timeout_s=120)[0]
    return found


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Measure every hook on every link, in turns, round after round; then what a step is made of."""
    training = Training(rank, size, job["bucket_mb"])
    links = {link: EmulatedLink(Link.parse(link)) for link in job["links"]}
    cells = [(link, hook) for link in links for hook in job["hooks"]]
    steps: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    for index in range(job["rounds"]):
        for at, (link, hook) in enumerate(cells):
            report((index + at / len(cells)) / job["rounds"], f"{hook} on {link}")
            steps[link, hook] += training.measure(hook, links[link], job["seconds"])
    training.hook.runner.lanes.hold = None
    layouts = [training.hook.layouts[index] for index in sorted(training.hook.layouts)]
    return {
        "measured_s": {
            link: {hook: statistics.median(steps[link, hook]) for hook in job["hooks"]} for link in job["links"]
        },
        "compute": dataclasses.asdict(training.compute()),
        "cpu_cost": {name: dataclasses.asdict(fit) for name, fit in probe(training.hook, pairs=False).cpu_cost.items()},
        "buckets": [[(part.name, list(part.param.shape)) for part in layout] for layout in layouts],
    }


class Training:
    """The built-in GPT on this rank, under a hook that is switched."""

    def __init__(self, rank: int, size: int, bucket_mb: float) -> None:
        self.workload = Workload(WorkloadSettings(text_bytes=200_000), seed=0, rank=rank, size=size)
        self.model = DistributedDataParallel(self.workload.model(), bucket_cap_mb=bucket_mb)
        self.optimizer = self.workload.optimizer(self.model)
        self.hook = gradwire.register(self.model, "exact")
        self.steps = 0
        for _ in range(3):  # until DDP has its final buckets
            self.step()

    def forward(self) -> Tensor:
        """The loss."""
        self.steps += 1
        self.optimizer.zero_grad()
        return self.workload.loss(self.model, self.workload.batch(self.steps))

    def step(self) -> None:
        """One step of training."""
        self.forward().backward()
        self.optimizer.step()

    def compute(self, steps: int = 12) -> Compute:
        """A step without communication, while all ranks compute."""
        self.hook.switch("noop")
        dist.barrier()
        self.step()
        return measure_compute(self.hook, self.forward, self.optimizer.step, steps=steps, cores=1)

    def measure(self, hook: str, link: EmulatedLink, seconds: float) -> list[float]:
        """Steps for about so long; the slowest rank's time of each."""
        self.hook.switch(hook)
        self.hook.runner.lanes.hold = link.hold
        (warm_s,) = self.timed(1)
        return self.timed(max(3, min(20, int(seconds / warm_s))))

    def timed(self, steps: int) -> list[float]:
        """Ranks start each step together."""
        taken = torch.zeros(steps)
        for at in range(steps):
            dist.barrier()
            began = time.perf_counter()
            self.step()
            taken[at] = time.perf_counter() - began
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return [float(value) for value in taken]


if __name__ == "__main__":
    main()
