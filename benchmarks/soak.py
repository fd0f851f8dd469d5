"""10,000 steps with 40 buckets in flight on 4 ranks: no hang, no mismatch, replicas bit-identical all the way.

python benchmarks/soak.py --hook fp16 --steps 10000 --ranks 4
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.testing import spawn_ranks

LAYERS, WIDTH = 40, 16


def rank_main(rank: int, size: int, spec: str, steps: int) -> dict[str, object]:
    """Train on random data, verify every tenth of the way."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    hook = gradwire.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=data)).square().mean().backward()
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            checked = hook.verify()
            if rank == 0:
                print(f"{step:>6} steps, {time.perf_counter() - began:6.0f} s: {checked}", flush=True)
    stats = hook.stats()
    hook.close()
    return {"steps": stats.steps, "buckets": stats.buckets}


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="fp16")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    results = spawn_ranks(args.ranks, rank_main, args.hook, args.steps, timeout_s=4 * 3600)
    print(
        f"{args.hook}: {results[0]['steps']} steps, {results[0]['buckets']:.1f} buckets a step, {args.ranks} ranks: ok"
    )


if __name__ == "__main__":
    main()
