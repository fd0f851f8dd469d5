"""Step time, bytes and error of FSDP2 and HSDP on shaped hosts, next to plain FSDP2. Needs root.

    python benchmarks/sharded.py --ranks 2 4 --rates 100mbit 1gbit --models mlp gpt
    python benchmarks/sharded.py --hsdp --rates 100mbit

A name is a spec and, after a slash, what parameters are gathered with: int8/bf16. `plain` is FSDP2 without gradwire, in
float32, and `plain-bf16` the same with parameters and reductions in bfloat16. With --hsdp there are two nodes of two
ranks, which share the node's link; inside a node nothing is shaped. There a name is the spec of the replicas, and
`plain` is FSDP2's own HSDP. All names run in the same processes, one after the other, round after round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
import netns
import shaped
from gradwire.tools.workload import Workload, WorkloadSettings

NAMES = ("plain", "plain-bf16", "exact", "bf16/bf16", "int8", "int8/bf16", "int8/int8", "int4/int8")
REPLICAS = ("plain", "exact", "bf16", "int8", "int4", "powersgd:rank=4")
LAYERS, WIDTH, BATCH = 8, 1024, 64
PASSED_ON = ("rounds", "seconds", "hsdp", "model")


def main() -> None:
    """Launch the cells, or be one rank of one."""
    args = parse_args()
    if args.rank is not None:
        run_rank(args)
        return
    netns.check_usable()
    records: list[dict] = []
    for model, ranks, rate in itertools.product(args.models, [4] if args.hsdp else args.ranks, args.rates):
        args.model = model
        records += run_cell(ranks, rate, args)
    if args.out:
        Path(args.out).write_text("".join(json.dumps(record) + "\n" for record in records))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--models", nargs="+", choices=["mlp", "gpt"], default=["mlp", "gpt"])
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--hsdp", action="store_true", help="two nodes of two ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="time a name gets in a round")
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_cell(ranks: int, rate: str, args: argparse.Namespace) -> list[dict]:
    """All names on `ranks` hosts, or on two hosts of two ranks, at `rate`."""
    names = args.names or (REPLICAS if args.hsdp else NAMES)
    with netns.hosts(2 if args.hsdp else ranks, None if rate == "none" else rate) as hosts:
        places = [host for host in hosts for _ in range(ranks // len(hosts))]
        cell = shaped.launch(places, list(names), args, 1800, __file__, PASSED_ON)
    where = "2 hosts of 2 ranks" if args.hsdp else f"{ranks} hosts"
    print(f"\n{where}, {rate}, {args.model}")
    print(f"{'name':<18}{'step ms':>9}  {'min-max':<13}{'vs plain':>9}{'MB sent':>9}{'error':>9}")
    base = next(
        (statistics.median(row["step_ms"]) for row in cell if row["hook"] == "plain" and "step_ms" in row), None
    )
    for row in cell:
        print(f"{row['hook']:<18}{row['failed']}" if "failed" in row else line(row, base), flush=True)
    return [{"ranks": ranks, "rate": rate, "model": args.model, "hsdp": args.hsdp, **row} for row in cell]


def line(row: dict, base: float | None) -> str:
    """One name of the table."""
    step = statistics.median(row["step_ms"])
    spread = f"{min(row['step_ms']):.0f}-{max(row['step_ms']):.0f}"
    faster = "-" if base is None else f"{base / step:.2f}"
    error = "-" if row["error"] is None else f"{row['error']:.1e}"
    return f"{row['hook']:<18}{step:>9.1f}  {spread:<13}{faster:>9}{row['sent_mb']:>9.2f}{error:>9}"


# -- one rank --------------------------------------------------------------------------------------------------------


def run_rank(args: argparse.Namespace) -> None:
    """Measure every name in turn, round after round."""
    job = json.loads(Path(args.job).read_text())
    store = Path(args.job).with_name("store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=args.rank, world_size=job["ranks"])
    runs = [Run(name, job) for name in job["hooks"]]
    exact = runs[0].gradient() if job["hooks"][0] == "plain" else None
    for run in runs:
        run.prepare(job["seconds"], exact)
    for _ in range(job["rounds"]):
        for run in runs:
            seconds, moved = run.timed(run.steps)
            run.times.append(seconds)
            run.sent.append(moved)
    if args.rank == 0:
        text = "".join(json.dumps(run.record()) + "\n" for run in runs)
        Path(args.job).with_name("records.jsonl").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


class Run:
    """One name on a model of its own."""

    def __init__(self, name: str, job: dict) -> None:
        self.name, self.times, self.sent, self.steps = name, list[float](), list[float](), 1
        self.error: float | None = None
        self.work = Workload(WorkloadSettings(), seed=0, rank=dist.get_rank(), size=dist.get_world_size())
        torch.manual_seed(0)
        mlp = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.model: Any = mlp if job["model"] == "mlp" else self.work.model()
        units = list(self.model if job["model"] == "mlp" else self.model.blocks)
        torch.manual_seed(1 + dist.get_rank())
        self.data = torch.randn(BATCH, WIDTH) if job["model"] == "mlp" else self.work.batch(0)
        self.hook = (self.build_hsdp if job["hsdp"] else self.build)(units)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def build(self, units: list[nn.Module]) -> Any:
        """FSDP2 over all ranks, with forward prefetching, which FSDP2 alone cannot use on the CPU."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        policy = bf16 if self.name == "plain-bf16" else MixedPrecisionPolicy()
        for unit in (*units, self.model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
        spec, _, gather = self.name.partition("/")
        return None if spec.startswith("plain") else gradwire.register(self.model, spec, gather=gather or None)

    def build_hsdp(self, units: list[nn.Module]) -> Any:
        """Two replicas of two shards."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if self.name != "plain":
            return gradwire.hsdp(self.model, mesh, units=units, replicas=self.name)
        for unit in (*units, self.model):
            fully_shard(unit, mesh=mesh)
        return None

    def prepare(self, seconds: float, exact: torch.Tensor | None) -> None:
        """Warm up, measure the error of the gradient, and fit the number of steps to the time there is."""
        for _ in range(2):
            self.step()
        if exact is not None:
            self.error = float((self.gradient() - exact).norm() / exact.norm())
        self.steps = max(1, min(40, int(seconds / self.timed(2)[0])))

    def gradient(self) -> torch.Tensor:
        """The whole gradient of one batch."""
        self.step()
        return torch.cat([param.grad.full_tensor().flatten().double() for param in self.model.parameters()])

    def step(self) -> None:
        """Forward, backward and an optimizer step that changes nothing."""
        self.optimizer.zero_grad()
        loss = self.model(self.data).square().mean() if self.data.is_floating_point() else self.loss()
        loss.backward()
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        """That of the built-in GPT."""
        return self.work.loss(self.model, self.data)

    def timed(self, steps: int) -> tuple[float, float]:
        """Seconds and sent bytes a step; the slowest rank counts."""
        dist.barrier()
        sent, began = shaped.sent_bytes(), time.perf_counter()
        for _ in range(steps):
            self.step()
        ended = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(ended, dist.ReduceOp.MAX)
        return float(ended) / steps, (shaped.sent_bytes() - sent) / steps

    def record(self) -> dict:
        """What goes into the file."""
        return {
            "hook": self.name,
            "step_ms": [1e3 * value for value in self.times],
            "sent_mb": statistics.median(self.sent) / 1e6,
            "error": self.error,
            "residual_mb": getattr(self.hook, "residual_bytes", 0) / 1e6,
        }


if __name__ == "__main__":
    main()
