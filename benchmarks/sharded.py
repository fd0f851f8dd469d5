"""Step time, bytes, memory and error of FSDP2 and HSDP on shaped hosts, next to plain FSDP2. Needs root.

    python benchmarks/sharded.py --ranks 2 4 --rates 100mbit 1gbit --models mlp gpt --out fsdp2.jsonl
    python benchmarks/sharded.py --hsdp --rates 100mbit --inside 10gbit --out hsdp.jsonl

A name is a spec and, after a slash, what parameters are gathered with: int8/bf16. `plain` is FSDP2 without gradwire.
Models compute in float32. With -bf16 after the name they compute and reduce in bfloat16, by FSDP2's mixed precision:
compare int8/int8-bf16 with plain-bf16. With --hsdp there are two nodes of two ranks: what leaves a node goes through
its link of `--rates`, and what stays inside through one of `--inside`. There a name is the spec of the replicas, and
`plain` is FSDP2's own HSDP.

All names run in the same processes, by turns. How many times as fast as `plain` a name is, is the median over the
rounds of the ratio within a round, with the smallest and the largest one. The tables are Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
import netns
import rounds
from gradwire.tools.workload import Workload, WorkloadSettings

NAMES = ("plain", "plain-bf16", "exact", "bf16/bf16", "int8", "int8/bf16", "int8/int8", "int4/int8", "int8/int8-bf16")
REPLICAS = ("plain", "exact", "bf16", "int8", "int4", "powersgd:rank=4")
LIMIT_S = 3600


def main() -> None:
    """Launch the cells, or be one rank of one."""
    args = parse_args()
    if args.rank is not None:
        rounds.run_rank(args, Run)
        return
    netns.check_usable()
    records: list[dict] = []
    for model, ranks, rate in itertools.product(args.models, [4] if args.hsdp else args.ranks, args.rates):
        cell = run_cell(ranks, rate, model, args)
        print(table(cell, title(ranks, rate, model, args)), flush=True)
        records += [{"ranks": ranks, "rate": rate, "model": model, "hsdp": args.hsdp, **row} for row in cell]
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
    parser.add_argument("--inside", default="10gbit", help="with --hsdp: the link inside a node, or none")
    rounds.add_arguments(parser, rounds=5)
    return parser.parse_args()


def run_cell(ranks: int, rate: str, model: str, args: argparse.Namespace) -> list[dict]:
    """All names on `ranks` hosts, or on two hosts of two ranks, at `rate`."""
    names = args.names or (REPLICAS if args.hsdp else NAMES)
    settings = {"rounds": args.rounds, "seconds": args.seconds, "hsdp": args.hsdp, "model": model}
    inside = args.inside if args.hsdp and args.inside != "none" else None
    with netns.hosts(2 if args.hsdp else ranks, None if rate == "none" else rate, inside) as hosts:
        places = [host for host in hosts for _ in range(ranks // len(hosts))]
        return rounds.launch(places, names, settings, LIMIT_S, __file__)


# -- the table -------------------------------------------------------------------------------------------------------


def title(ranks: int, rate: str, model: str, args: argparse.Namespace) -> str:
    """What a table is about."""
    where = f"2 hosts of 2 ranks, {args.inside} inside, {rate} across" if args.hsdp else f"{ranks} hosts, {rate}"
    return f"### {where}, {model}"


def table(cell: list[dict], heading: str) -> str:
    """One cell as Markdown."""
    base = next((row for row in cell if row["hook"] == "plain"), None)
    lines = [
        f"\n{heading}\n",
        "| name | step, ms | times as fast as plain | CPU ms | MB sent | error | waits, ms | peak MB |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    lines += [f"| `{row['hook']}` | {row['failed']} |" if "failed" in row else line(row, base) for row in cell]
    return "\n".join(lines)


def line(row: dict, base: dict | None) -> str:
    """One name of the table. It waits for gradients, parameters and replicas."""
    step = f"{rounds.median_ms(row):.1f} ({min(row['step_ms']):.1f}-{max(row['step_ms']):.1f})"
    ratios = rounds.faster(row, base)
    faster = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
    error = "-" if row["error"] is None else f"{row['error']:.1e}"
    waits = " + ".join(f"{value:.1f}" for value in row["wait_ms"].values()) or "-"
    peak = f"{row['peak_mb'] + row['residual_mb']:.2f}"
    moved = f"{row['cpu_ms']:.0f} | {row['sent_mb']:.2f} | {error} | {waits} | {peak}"
    return f"| `{row['hook']}` | {step} | {faster} | {moved} |"


# -- one rank --------------------------------------------------------------------------------------------------------


class Run(rounds.Run):
    """One name on a model of its own."""

    exact: torch.Tensor | None = None
    """The gradient with plain FSDP2, if that is the first name."""

    def __init__(self, name: str, job: dict) -> None:
        super().__init__(name)
        self.work = Workload(WorkloadSettings(), seed=0, rank=dist.get_rank(), size=dist.get_world_size())
        is_mlp = job["model"] == "mlp"
        self.model: Any = rounds.mlp() if is_mlp else self.work.model()
        units = list(self.model if is_mlp else self.model.blocks)
        torch.manual_seed(1 + dist.get_rank())
        self.data = torch.randn(rounds.BATCH, rounds.WIDTH) if is_mlp else self.work.batch(0)
        self.hook = (self.build_hsdp if job["hsdp"] else self.build)(units)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def build(self, units: list[nn.Module]) -> Any:
        """FSDP2 over all ranks, with prefetching, which FSDP2 alone cannot use on the CPU, where its gathers block."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        policy = bf16 if self.name.endswith("-bf16") else MixedPrecisionPolicy()
        for unit in (*units, self.model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        prefetch(self.model, units)
        spec, _, gather = self.name.removesuffix("-bf16").partition("/")
        return None if spec == "plain" else gradwire.register(self.model, spec, gather=gather or None)

    def build_hsdp(self, units: list[nn.Module]) -> Any:
        """Two replicas of two shards."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if self.name != "plain":
            return gradwire.hsdp(self.model, mesh, units=units, replicas=self.name)
        for unit in (*units, self.model):
            fully_shard(unit, mesh=mesh)
        return None

    def warm_up(self) -> None:
        """Two steps; then the error of the gradient is measured."""
        super().warm_up()
        gradient = self.gradient()
        if self.name == "plain":
            Run.exact = gradient
        elif Run.exact is not None:
            self.error = float((gradient - Run.exact).norm() / Run.exact.norm())

    def fit(self, seconds: float) -> None:
        """Statistics are those of the rounds."""
        super().fit(seconds)
        if self.hook is not None:
            self.hook.reset_stats()

    def gradient(self) -> torch.Tensor:
        """The whole gradient of one batch."""
        self.step()
        return torch.cat([param.grad.full_tensor().flatten().double() for param in self.model.parameters()])

    def step(self) -> None:
        """Forward, backward and an optimizer step that changes nothing."""
        self.optimizer.zero_grad()
        if self.data.is_floating_point():
            self.model(self.data).square().mean().backward()
        else:
            self.work.loss(self.model, self.data).backward()
        self.optimizer.step()

    def details(self) -> dict:
        """Where the model waited, and the memory that the hook took at most."""
        if self.hook is None:
            return {"wait_ms": {}, "residual_mb": 0.0, "peak_mb": 0.0, "parts": {}}
        parts = {name: part.as_dict() for name, part in self.hook.stats_by_part().items()}
        return {
            "wait_ms": {name: 1e3 * part["wait_s"] for name, part in parts.items()},
            "residual_mb": self.hook.residual_bytes / 1e6,
            "peak_mb": self.hook.stats().peak_bytes / 1e6,
            "parts": parts,
        }


def prefetch(model: Any, units: list[Any]) -> None:
    """Gather the parameters of two modules ahead, forward and backward."""
    model.set_modules_to_forward_prefetch(units[:2])
    model.set_modules_to_backward_prefetch(units[::-1][:2])
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 3])
        unit.set_modules_to_backward_prefetch(units[max(place - 2, 0) : place][::-1])


if __name__ == "__main__":
    main()
