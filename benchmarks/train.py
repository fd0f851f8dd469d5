"""Does a hook change what is learnt? The built-in GPT under every hook, over several seeds, at equal steps.

    python benchmarks/train.py --ranks 4 --steps 250 --seeds 0 1 2 --hooks int8 int4 int3 --out train.jsonl

The gap to exact averaging is taken seed by seed. It is judged by the spread that another seed alone makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.tools.measure.grid import checked, measure
from gradwire.tools.records.records import PLAIN, Record, Settings
from gradwire.tools.workload import WorkloadSettings

HOOKS = ("int8", "int6", "int4", "int3", "int2", "int2:feedback=true", "sign", "sign:feedback=true", "topk")


def main() -> None:
    """Train seed by seed, and print the table."""
    args = parse_args()
    hooks = checked([PLAIN, *args.hooks])
    losses: dict[str, list[float]] = {hook: [] for hook in hooks}
    for seed in args.seeds:
        for record in train(hooks, seed, args):
            losses[record.hook].append(record.loss)
            if args.out:
                write(args.out, seed, args, record)
        print(f"seed {seed}: " + ", ".join(f"{hook} {values[-1]:.4f}" for hook, values in losses.items()), flush=True)
    print("\n" + table(losses, args.optimizer))


def train(hooks: Sequence[str], seed: int, args: argparse.Namespace) -> list[Record]:
    """All hooks on one seed."""
    rate = args.learning_rate or {"adamw": 1e-3, "sgd": 0.1}[args.optimizer]
    workload = WorkloadSettings(optimizer=args.optimizer, learning_rate=rate)
    settings = Settings(nproc=args.ranks, steps=args.steps, round_steps=50, seed=seed, workload=workload)
    return measure(hooks, settings)


def table(losses: Mapping[str, Sequence[float]], optimizer: str, baseline: str = "plain DDP") -> str:
    """A row a hook: its loss, the gap to the baseline, and the gap in standard deviations of the seeds."""
    plain = losses[PLAIN]
    spread = statistics.stdev(plain) if len(plain) > 1 else float("nan")
    rows = [f"{optimizer}: held-out loss over {len(plain)} seeds; another seed moves {baseline} by {spread:.4f} (s.d.)"]
    rows.append(f"{'hook':<24}{'loss':>8}{'gap':>9}{'worst gap':>11}{'gap / s.d.':>12}")
    for hook, values in losses.items():
        gaps = [value - base for value, base in zip(values, plain, strict=True)]
        gap = statistics.mean(gaps)
        rows.append(f"{hook:<24}{statistics.mean(values):8.4f}{gap:+9.4f}{max(gaps):+11.4f}{gap / spread:12.1f}")
    return "\n".join(rows)


def write(path: Path, seed: int, args: argparse.Namespace, record: Record) -> None:
    """One JSON line."""
    line = {"seed": seed, "optimizer": args.optimizer, "ranks": args.ranks, "steps": record.steps}
    with path.open("a") as file:
        file.write(json.dumps({**line, "hook": record.hook, "loss": record.loss}) + "\n")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hooks", nargs="+", default=HOOKS)
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--learning-rate", type=float, help="1e-3 for adamw, 0.1 for sgd unless said otherwise")
    parser.add_argument("--out", type=Path, help="JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
