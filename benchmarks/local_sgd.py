"""Local training against synchronous training: the built-in GPT at equal steps, bytes sent a step and held-out loss.

    python benchmarks/local_sgd.py --steps 300 --sync-every 10 25 50 --exchanges exact int4:feedback=true

The baseline is DDP with the bf16 hook. A link time is what the bytes alone take at --mbit; nothing is shaped here.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.models.register import register
from gradwire.optim import DiLoCo, LocalSGD
from gradwire.testing import spawn_ranks
from gradwire.tools.workload import Workload, WorkloadSettings


def main() -> None:
    """Train all ways one after the other, and print a row each."""
    args = parse_args()
    print(head(args), flush=True)
    spawn_ranks(args.ranks, run, args, timeout_s=args.limit_s)


def run(rank: int, size: int, args: argparse.Namespace) -> None:
    """All ways on one rank. Rank 0 prints each as it is done."""
    workload = Workload(WorkloadSettings(), seed=args.seed, rank=rank, size=size)
    base: dict[str, float] | None = None
    for way in ways(args):
        result = measured(workload, way, args.steps)
        base = base or result
        if rank == 0:
            print(line(way, result, base, args.mbit), flush=True)


def ways(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The baseline, then every combination asked for."""
    yield {"kind": "ddp", "exchange": "bf16"}
    for kind, sync_every, exchange in itertools.product(args.kinds, args.sync_every, args.exchanges):
        yield {
            "kind": kind,
            "sync_every": sync_every,
            "exchange": exchange,
            "fragments": args.fragments,
            "outer": outer(kind, args),
        }


def outer(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """What only DiLoCo has."""
    return {"outer_lr": args.outer_lr, "outer_momentum": args.outer_momentum} if kind == "diloco" else {}


def measured(workload: Workload, way: Mapping[str, Any], steps: int) -> dict[str, float]:
    """What one way sent a step, its loss on held-out text, its seconds a step."""
    began = time.perf_counter()
    model, sent = trained(workload, way, steps)
    seconds = time.perf_counter() - began
    total = torch.tensor(workload.held_out_loss(model), dtype=torch.float64)
    dist.all_reduce(total)
    return {"loss": float(total[0] / total[1]), "sent": sent / steps, "step_s": seconds / steps}


def trained(workload: Workload, way: Mapping[str, Any], steps: int) -> tuple[torch.nn.Module, float]:
    """The model, alike on all ranks, and the bytes that this rank has sent in all."""
    model = workload.model()
    if way["kind"] == "ddp":
        wrapped = DistributedDataParallel(model)
        hook = register(wrapped, way["exchange"])
        train(workload, wrapped, workload.optimizer(model), steps)
        stats = hook.stats()
        hook.close()
        return model, stats.sent_bytes * stats.steps
    optimizer = workload.optimizer(model)
    kind = {"local": LocalSGD, "diloco": DiLoCo}[way["kind"]]
    settings = {key: way[key] for key in ("sync_every", "exchange", "fragments")}
    with kind(model, optimizer, delay=min(1, way["sync_every"] - 1), **settings, **way["outer"]) as rounds:
        train(workload, model, optimizer, steps)
    stats = rounds.hook.stats()
    return model, stats.sent_bytes * stats.steps


def train(workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """An ordinary loop."""
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate(step)
        optimizer.zero_grad()
        workload.loss(model, workload.batch(step)).backward()
        optimizer.step()


def head(args: argparse.Namespace) -> str:
    """What was run, and the names of the columns."""
    told = f"{args.ranks} ranks, {args.steps} steps, {args.fragments} fragments, seed {args.seed}"
    columns = f"{'way':<34}{'kB/step':>9}{'fewer':>8}{'link ms':>9}{'loss':>8}{'gap':>8}{'s/step':>8}"
    return f"{told}; link time at {args.mbit:g} Mbit/s\n{columns}"


def line(way: Mapping[str, Any], result: Mapping[str, float], base: Mapping[str, float], mbit: float) -> str:
    """A row of the table."""
    name = f"{way['kind']} {way['exchange']}" + (f" H={way['sync_every']}" if way["kind"] != "ddp" else "")
    fewer, gap = base["sent"] / result["sent"], result["loss"] / base["loss"] - 1
    link_ms = result["sent"] * 8 / mbit / 1e3
    numbers = f"{result['sent'] / 1e3:9.1f}{fewer:7.0f}x{link_ms:9.2f}{result['loss']:8.4f}{gap:+8.1%}"
    return f"{name:<34}{numbers}{result['step_s']:8.3f}"


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sync-every", type=int, nargs="+", default=[50])
    parser.add_argument("--exchanges", nargs="+", default=["exact", "int4:feedback=true"])
    parser.add_argument("--kinds", nargs="+", choices=["local", "diloco"], default=["local", "diloco"])
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--outer-lr", type=float, default=0.7, help="DiLoCo's")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="DiLoCo's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="give up after so long")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
