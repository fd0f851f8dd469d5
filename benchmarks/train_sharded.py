"""Does compressed FSDP2 change what is learnt? The built-in GPT on several ranks, over several seeds, at equal steps.

    python benchmarks/train_sharded.py --ranks 4 --steps 300 --seeds 0 1 2 --out train_sharded.jsonl

A name is a spec and, after a slash, what parameters are gathered with, as in `benchmarks/sharded.py`. The gap to plain
FSDP2 is taken seed by seed, and judged by the spread that another seed alone makes. The loss is that of the parameters
that training computes with: those that `gather` has decoded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
import train
from gradwire.testing import spawn_ranks
from gradwire.tools.workload import Workload, WorkloadSettings

NAMES = ("int8", "int8/bf16", "int8/int8")


def main() -> None:
    """Train seed by seed, and print the table."""
    args = parse_args()
    names = [train.PLAIN, *args.names]
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in args.seeds:
        found = spawn_ranks(args.ranks, train_all, names, seed, args.steps, timeout_s=24 * 3600.0)[0]
        for name, loss in found.items():
            losses[name].append(loss)
            write(args, seed, name, loss)
        print(f"seed {seed}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in found.items()), flush=True)
    print("\n" + train.table(losses, "adamw", "plain FSDP2"))


def train_all(rank: int, size: int, names: list[str], seed: int, steps: int) -> dict[str, float]:
    """The held-out loss of every name after training, on one seed."""
    torch.set_num_threads(1)
    work = Workload(WorkloadSettings(eval_windows=512), seed=seed, rank=rank, size=size)
    return {name: train_one(work, name, steps) for name in names}


def train_one(work: Workload, name: str, steps: int) -> float:
    """Train a fresh model."""
    model, mesh = work.model(), init_device_mesh("cpu", (work.size,))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    spec, _, gather = name.partition("/")
    hook = None if name == train.PLAIN else gradwire.register(model, spec, gather=gather or None)
    optimizer = work.optimizer(model)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = work.learning_rate(step)
        optimizer.zero_grad()
        work.loss(model, work.batch(step)).backward()
        optimizer.step()
    total = torch.tensor(work.held_out_loss(model), dtype=torch.float64)
    dist.all_reduce(total)
    if hook is not None:
        hook.verify()
        dist.barrier()
        hook.close()
    return float(total[0] / total[1])


def write(args: argparse.Namespace, seed: int, name: str, loss: float) -> None:
    """One JSON line."""
    if args.out:
        line = {"seed": seed, "ranks": args.ranks, "steps": args.steps, "hook": name, "loss": loss}
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--out", type=Path, help="JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
