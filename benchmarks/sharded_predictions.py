"""Predictions for models with `fully_shard` against measured steps, on local ranks over an emulated link.

    python benchmarks/sharded_predictions.py --ranks 2 --links 100mbit 1gbit --out predictions.jsonl

measured    the built-in GPT under FSDP2, one unit per block: the median step of the slowest rank in `gradwire advise`
advise      its prediction, from the timeline of a step
simulate    that of `gradwire simulate --mode fsdp`, from the number of parameters and the time of a step alone

Local ranks share the cores, and `simulate` is told so: see `simulate.py`.
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
from torch.distributed.fsdp import fully_shard

from gradwire.advisor import Link, advise
from gradwire.tools.launch.launch import cores
from gradwire.tools.launch.script import Script
from gradwire.tools.measure.simulate import Scene
from gradwire.tools.measure.simulate_sharded import simulate_sharded
from gradwire.tools.workload import Workload, WorkloadSettings

HOOKS = ("bf16/bf16", "int8", "int8/bf16", "int8/int8")
WAYS = ("advise", "simulate")
MOST_STEPS = 1000


def main() -> None:
    """Measure and predict all cells, or train on one rank of one."""
    args = parse_args()
    if args.train:
        train()
        return
    records = [row for ranks, link in itertools.product(args.ranks, args.links) for row in cell(ranks, link, args)]
    if args.out:
        Path(args.out).write_text("".join(json.dumps(record) + "\n" for record in records))
    for way in WAYS:
        off = [abs(error(record, way)) for record in records]
        print(f"{way}: off by {statistics.median(off):.0%} in the median, by {max(off):.0%} at worst")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--hooks", nargs="+", default=list(HOOKS))
    parser.add_argument("--steps", type=int, default=32, help="steps to time for the headroom")
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def cell(ranks: int, link: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of one number of ranks and link, printed as a table."""
    advice = advise(Script(__file__, ("--train",)), hooks=args.hooks, steps=args.steps, link=link, nproc=ranks)
    assert advice is not None
    share, rows = cores() / ranks, [row for row in advice.rows if row.measured_s is not None]
    scene = Scene(
        mode="fsdp",
        ranks=(ranks,),
        links=(Link.parse(link),),
        compute_s=statistics.median(advice.headroom.without_s),
        params=advice.params,
        cores=max(share, 1.0),
        codec_speed=min(share, 1.0),
    )
    simulated = {each.hook: each.predictions[0][0].step_s for each in simulate_sharded(args.hooks, scene)}
    print(f"\n{ranks} ranks on {cores()} cores, {link}; ms a step")
    print(f"{'hook':<12}{'measured':>10}{'advise':>16}{'simulate':>16}")
    records = []
    for row in rows:
        times = {"measured_s": row.measured_s, "advise_s": row.predicted_s, "simulate_s": simulated[row.hook]}
        records.append({"ranks": ranks, "link": link, "hook": row.hook, **times})
        told = "".join(f"{1e3 * records[-1][f'{way}_s']:>10.1f}{error(records[-1], way):>+6.0%}" for way in WAYS)
        print(f"{row.hook:<12}{1e3 * (row.measured_s or 0.0):>10.1f}{told}", flush=True)
    return records


def error(record: dict[str, Any], way: str) -> float:
    """Of a prediction, relative."""
    return float(record[f"{way}_s"] / record["measured_s"] - 1)


def train() -> None:
    """The script under test: an ordinary training with FSDP2."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    work = Workload(WorkloadSettings(text_bytes=200_000), seed=0, rank=rank, size=size)
    model: Any = work.model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(MOST_STEPS):
        optimizer.zero_grad()
        work.loss(model, work.batch(step)).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
