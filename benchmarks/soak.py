"""Soak: every hook for many steps. Memory, threads and sockets stay constant, and replicas stay identical.

    python benchmarks/soak.py                                         # every hook, 10,000 steps on 4 ranks
    python benchmarks/soak.py --ranks 16 --steps 1000 --hooks int8 topk
    python benchmarks/soak.py --records soak.jsonl                    # go on after the hooks that are in the file

Layers have random sizes and buckets a random cap, the same on all ranks. In one step of a hundred a rank has an inf or
a NaN, and all ranks must skip it. Ranks pause at random. Ten times on the way `verify()` compares the replicas and the
hook's results. In the second half, the resident memory of a rank must not grow by more than 4 MB and 512 bytes per
step, and its threads and sockets must stay the same.

With `--records` the results of a hook are appended to a file as soon as it is done, and hooks that are in it already
(with the same ranks and steps) are not run again. Without problems a slow machine changes nothing but the duration:
collectives wait for `--timeout-s`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.exchanges import EXCHANGES
from gradwire.testing import spawn_ranks
from gradwire.tools.records.table import text_table

HOOKS = (
    *(name for name in EXCHANGES if name not in ("noop", "powersgd")),
    "fp16:feedback=true",
    "int8:rounding=stochastic",
    "int4:feedback=true,exempt=none",
    "int3:allocate=true,exempt=none",
    "sign:feedback=true,exempt=none",
    "powersgd:rank=1,min_compression=0.5",
    "powersgd:rank=1,batched=true",
)
LAYERS, CHECKS = 12, 10
NON_FINITE, PAUSES, PAUSE_S = 0.01, 0.02, 0.02
MOST_BYTES, MOST_BYTES_PER_STEP = 4 << 20, 512
"""By how much the memory may grow in the second half: allocators keep some of what they have freed."""


def held() -> tuple[int, int, int]:
    """The resident bytes, threads and sockets of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sockets = 0
    for entry in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd", entry)
        sockets += link.is_symlink() and os.readlink(link).startswith("socket:")
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/task")), sockets


def model_of(draw: random.Random) -> DistributedDataParallel:
    """Layers of random widths, in buckets of a random size."""
    widths = [draw.choice((8, 16, 33, 64, 100)) for _ in range(LAYERS + 1)]
    torch.manual_seed(draw.getrandbits(32))
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=draw.choice((0.001, 0.01, 0.1)))


def rank_main(rank: int, size: int, spec: str, steps: int) -> dict[str, Any]:
    """Train on random data; what was held at each check, and how many steps were skipped."""
    draw, own = random.Random(f"{spec} {size}"), random.Random(rank)
    model = model_of(draw)
    hook, optimizer = gradwire.register(model, spec), torch.optim.SGD(model.parameters(), lr=1e-3)
    data, samples, skipped, width = torch.Generator().manual_seed(rank), [], 0, model.module[0].in_features
    for step in range(1, steps + 1):
        bad = draw.choice((math.inf, math.nan)) if draw.random() < NON_FINITE else 1.0
        guilty = draw.randrange(size)
        optimizer.zero_grad()
        loss = model(torch.randn(4, width, generator=data)).square().mean()
        (loss * bad if rank == guilty else loss).backward()
        finite = all(bool(torch.isfinite(param.grad).all()) for param in model.parameters())
        assert finite == (bad == 1.0), f"step {step}: a rank had {bad}, and the mean is finite: {finite}"
        skipped += not finite
        if finite:
            optimizer.step()
        if own.random() < PAUSES:
            time.sleep(own.random() * PAUSE_S)
        if step % max(1, steps // CHECKS) == 0:
            samples.append((step, *held()))
            hook.verify()  # no rank closes its connections before all have counted theirs
    stats = hook.stats()
    hook.close()
    return {"samples": samples, "skipped": skipped, "buckets": stats.buckets}


def problems(samples: Sequence[tuple[int, int, int, int]]) -> tuple[float, list[str]]:
    """The growth of the memory in bytes per step, and what did not stay as it was."""
    (first, *before), (last, *after) = samples[len(samples) // 2 - 1], samples[-1]
    grown, steps = after[0] - before[0], max(last - first, 1)
    growth, too_much = grown / steps, grown > MOST_BYTES + MOST_BYTES_PER_STEP * steps
    found = [f"memory grew by {growth:.0f} bytes per step"] if too_much else []
    names = zip(("threads", "sockets"), before[1:], after[1:], strict=True)
    return growth, found + [f"{name}: {was} before, {now} after" for name, was, now in names if was != now]


def soak(spec: str, ranks: int, steps: int, timeout_s: float) -> dict[str, Any]:
    """Run one hook: what came of it."""
    began = time.monotonic()
    record = {"hook": spec, "ranks": ranks, "steps": steps, "date": datetime.date.today().isoformat()}
    try:
        results = spawn_ranks(ranks, rank_main, spec, steps, timeout_s=timeout_s)
    except Exception as error:
        return {**record, "problems": f"{type(error).__name__}: {error}"}
    judged = [problems(result["samples"]) for result in results]
    wrong = "; ".join(f"rank {rank}: {text}" for rank, (_, found) in enumerate(judged) for text in found)
    *_, threads, sockets = results[0]["samples"][-1]
    growth, first = max(growth for growth, _ in judged), results[0]
    record |= {"buckets": first["buckets"], "skipped": first["skipped"], "growth": growth, "threads": threads}
    record |= {"sockets": sockets, "seconds": round(time.monotonic() - began), "problems": wrong or "none"}
    return {**record, "samples": [result["samples"] for result in results]}


def row(record: dict[str, Any]) -> list[str]:
    """A line of the table."""
    first = [record["hook"], str(record["ranks"]), str(record["steps"])]
    if "growth" not in record:
        return [*first, "", "", "", "", "", record["problems"]]
    cells = [f"{record['buckets']:.1f}", record["skipped"], f"{record['growth']:.0f}", record["threads"]]
    return [*first, *map(str, cells), str(record["sockets"]), record["problems"]]


def recorded(path: Path | None) -> list[dict[str, Any]]:
    """What earlier runs have found."""
    return [] if path is None or not path.exists() else [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    """Run all hooks, one after the other. Returns 1 if anything went wrong."""
    args = parse_args()
    known = {(record["hook"], record["ranks"], record["steps"]): record for record in recorded(args.records)}
    for spec in args.hooks:
        key = spec, args.ranks, args.steps
        if key in known:
            continue
        known[key] = record = soak(*key, args.timeout_s)
        print(f"{spec}: {record.get('seconds', 0)} s: {record['problems']}", flush=True)
        if args.records is not None:
            with args.records.open("a") as file:
                file.write(json.dumps(record) + "\n")
    rows = [row(known[spec, args.ranks, args.steps]) for spec in args.hooks]
    head = ["hook", "ranks", "steps", "buckets", "skipped", "growth B/step", "threads", "sockets", "problems"]
    print(text_table([head, *rows], right=range(1, 8)))
    return int(any(cells[-1] != "none" for cells in rows))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hooks", nargs="+", default=list(HOOKS))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--records", type=Path, help="a file of JSON lines to append to, and to continue from")
    parser.add_argument("--timeout-s", type=float, default=12 * 3600.0, help="for a hook, and for each collective")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
