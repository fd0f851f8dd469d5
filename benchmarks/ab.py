"""Is this tree as fast as another one? Both run `shaped.py` by turns, and are compared pair by pair. Needs root.

    git worktree add /tmp/before COMMIT
    python benchmarks/ab.py /tmp/before --ranks 2 --rate 1gbit --hooks exact bf16 int8 int4 powersgd:rank=4

A pair is one run of each tree, one after the other; the order changes from pair to pair. What is printed is the median
over the pairs of (step time here / step time there), with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
HOOKS = ["noop", "plain", "exact", "bf16", "int8", "int4", "powersgd:rank=4"]


def main() -> None:
    """Run the pairs and print a table that grows more certain."""
    args = parse_args()
    ratios: dict[str, list[float]] = {hook: [] for hook in args.hooks}
    times_ms: dict[str, list[float]] = {hook: [] for hook in args.hooks}
    for pair in range(args.pairs):
        trees = [HERE, args.other] if pair % 2 == 0 else [args.other, HERE]
        medians = {tree: run(tree, args) for tree in trees}
        for hook in args.hooks:
            ratios[hook].append(medians[HERE][hook] / medians[args.other][hook])
            times_ms[hook].append(medians[HERE][hook])
    print(f"{args.ranks} hosts, {args.rate}, {args.pairs} pairs")
    print(f"{'hook':<24}{'ms here':>9}{'here / there':>14}  min-max")
    for hook, found in ratios.items():
        here = statistics.median(times_ms[hook])
        print(f"{hook:<24}{here:>9.1f}{statistics.median(found):>14.3f}  {min(found):.3f}-{max(found):.3f}")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of the other commit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument(
        "--hooks", nargs="+", default=["noop", "plain", "exact", "bf16", "int8", "int4", "powersgd:rank=4"]
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    return parser.parse_args()


def run(tree: Path, args: argparse.Namespace) -> dict[str, float]:
    """The median step time of every hook, in ms, with the sources and the benchmark of `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "records.jsonl")
        command = [
            sys.executable,
            str(tree / "benchmarks" / "shaped.py"),
            "--ranks",
            str(args.ranks),
            "--rates",
            args.rate,
        ]
        command += ["--hooks", *args.hooks, "--risky", "--rounds", str(args.rounds), "--seconds", str(args.seconds)]
        env = {**os.environ, "PYTHONPATH": str(tree / "src")}
        subprocess.run([*command, "--out", str(out)], env=env, check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in out.read_text().splitlines()]
    return {record["hook"]: statistics.median(record["step_ms"]) for record in records}


if __name__ == "__main__":
    main()
