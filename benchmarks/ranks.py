"""What an engine costs as the number of ranks grows: bytes, sockets, threads, memory, start-up, registration, latency.

    python benchmarks/ranks.py --ranks 2 4 8 16 --hook int8 --out ranks.jsonl

All ranks share the cores of this machine, so that times are those of a crowded host, and only their growth says
something. docs/engine.md has the formulas, and tests/benchmarks/test_ranks.py checks those that are exact.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine.lanes import slow_link
from gradwire.testing import spawn_ranks

LATENCY_S = 0.05
WIDTH, LAYERS = 512, 8


def usage() -> dict[str, int]:
    """Of this process: the connections it has opened, and its threads."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def peak_bytes(reset: bool = False) -> int:
    """The most memory that this process has had since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def model_of(width: int, layers: int, group: Any = None) -> DistributedDataParallel:
    """Equal layers, a bucket each."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return DistributedDataParallel(module, bucket_cap_mb=width * width * 4 / 2**20, process_group=group)


def train(model: DistributedDataParallel, width: int, steps: int) -> float:
    """Seconds per step, on random data."""
    began = time.perf_counter()
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
    return (time.perf_counter() - began) / steps


def rank_main(rank: int, size: int, spec: str) -> dict[str, Any]:
    """Everything on one rank."""
    model = model_of(WIDTH, LAYERS)
    train(model, WIDTH, 3)
    peak, before = peak_bytes(reset=True), usage()
    train(model, WIDTH, 3)
    plain = peak_bytes() - peak
    dist.barrier()
    began, peak = time.perf_counter(), peak_bytes(reset=True)
    hook = gradwire.register(model, spec)
    registration_s = time.perf_counter() - began
    train(model, WIDTH, 3)
    after = usage()
    sent = hook.stats().sent_bytes
    measured = {
        "registration_s": registration_s,
        "sent_bytes": sent,
        "extra_mb": (peak_bytes() - peak - plain) / 1e6,
        **{key: after[key] - before[key] for key in after},
        "latencies": {count: round_trips(spec, count) for count in (1, 8, 32)},
    }
    hook.close()
    return measured


def round_trips(spec: str, buckets: int) -> float:
    """By how many round trips of a slow link a step with so many buckets grows."""
    model = model_of(32, buckets)
    token = slow_link.set(slow)  # registration measures the latency
    hook = gradwire.register(model, spec)
    slow_link.reset(token)
    hook.runner.lanes.hold = None  # type: ignore[attr-defined]
    fast_s = (train(model, 32, 2), train(model, 32, 3))[1]
    hook.runner.lanes.hold = slow  # type: ignore[attr-defined]
    slow_s = train(model, 32, 3)
    hook.close()
    return (slow_s - fast_s) / LATENCY_S


def slow(*_: object) -> float:
    """What every collective waits for on the slow link."""
    time.sleep(LATENCY_S)
    return LATENCY_S


def main() -> None:
    """A row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--hook", default="int8")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print("ranks  start-up s  registration s  MB sent  MB extra  sockets  threads  round trips with 1, 8, 32 buckets")
    for size in args.ranks:
        began = time.perf_counter()
        spawn_ranks(size, start_main, timeout_s=600)
        start_s = time.perf_counter() - began
        rows = spawn_ranks(size, rank_main, args.hook, timeout_s=1200)
        print(line(size, start_s, rows), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({"ranks": size, "hook": args.hook, "start_s": start_s, "rows": rows}) + "\n")


def start_main(rank: int, size: int) -> None:
    """Nothing: how long processes and the process group take."""


def line(size: int, start_s: float, rows: list[dict[str, Any]]) -> str:
    """The slowest and largest of all ranks."""
    most = {key: max(row[key] for row in rows) for key in rows[0] if key != "latencies"}
    trips = ", ".join(f"{max(row['latencies'][count] for row in rows):.1f}" for count in (1, 8, 32))
    return (
        f"{size:>5}{start_s:>12.1f}{most['registration_s']:>16.2f}{most['sent_bytes'] / 1e6:>9.2f}"
        f"{most['extra_mb']:>10.1f}{most['sockets']:>9}{most['threads']:>9}  {trips}"
    )


if __name__ == "__main__":
    main()
