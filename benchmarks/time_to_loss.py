"""Wall-clock time until the held-out loss of 300 exact steps: the built-in GPT on shaped hosts, several hooks.

    python benchmarks/time_to_loss.py curves --ranks 2 4 --seeds 0 1 2   # losses, whatever the load of the machine
    python benchmarks/time_to_loss.py steps --ranks 2 4                  # step times on shaped hosts; quiet, as root
    python benchmarks/time_to_loss.py check --ranks 2 --rates 100mbit    # one whole run against the product of both
    python benchmarks/time_to_loss.py page                               # the table and the picture

The loss of a step does not depend on the link, and the time of a step does not depend on the seed. So each is recorded
once, and the time to a loss is the number of steps times the time of a step. Curves that the file has are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import netns
import rounds
from error_plot import stroke, text
from gradwire.optim import DiLoCo, LocalSGD, OneBitAdamW
from gradwire.testing import spawn_ranks
from gradwire.tools.workload import Workload, WorkloadSettings

METHODS = (
    "plain",
    "bf16",
    "int8",
    "int4",
    "powersgd:rank=16",
    "int2:whiten=true",
    "OneBitAdamW",
    "LocalSGD",
    "DiLoCo",
)
LOCAL = {"LocalSGD": LocalSGD, "DiLoCo": DiLoCo}
SYNC_EVERY = 10
EXACT_STEPS, MOST_STEPS, EVERY = 300, 450, 10
"""Steps of plain DDP to the loss that counts, the most steps of any method, and the steps between two evaluations."""
FOLDER = Path(".benchmarks")
RESULTS = Path(__file__).parent / "results"


class Training:
    """One method on one rank. `step(i)` trains, `module` has the parameters."""

    def __init__(self, method: str, workload: Workload) -> None:
        self.workload, self.module, self.close = workload, workload.model(), lambda: None
        self.model: nn.Module = self.module
        self.optimizer = workload.optimizer(self.module)
        if method in LOCAL:
            wrapper = LOCAL[method](self.module, self.optimizer, sync_every=SYNC_EVERY, exchange="bf16")
            wrapper.__enter__()
            self.close = wrapper.hook.close
        elif method == "OneBitAdamW":
            self.optimizer = self.one_bit(self.optimizer.param_groups[0])
        else:
            self.model = DistributedDataParallel(self.module)
            if method != "plain":
                options: dict[str, Any] = {"optimizer": self.optimizer} if "whiten" in method else {}
                self.close = gradwire.register(self.model, method, **options).close

    def one_bit(self, settings: dict[str, Any]) -> torch.optim.Optimizer:
        """With the settings of AdamW."""
        same = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
        return OneBitAdamW(self.module.parameters(), warmup=30, **same)

    def step(self, index: int) -> None:
        """An ordinary step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.workload.learning_rate(index)
        self.optimizer.zero_grad()
        self.workload.loss(self.model, self.workload.batch(index)).backward()
        self.optimizer.step()

    def loss(self) -> float:
        """On held-out text, the mean over the ranks."""
        total = torch.tensor(self.workload.held_out_loss(self.module), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])


# -- losses ------------------------------------------------------------------------------------------------------------


def record_curves(args: argparse.Namespace) -> None:
    """Train what is missing."""
    path = FOLDER / "time_to_loss_curves.jsonl"
    done = {(row["ranks"], row["seed"], row["method"]) for row in read(path)}
    for size in args.ranks:
        for seed in args.seeds:
            for method in args.methods:
                if (size, seed, method) not in done:
                    losses = spawn_ranks(size, curve, method, seed, args.steps, timeout_s=7200)[0]
                    add(path, {"ranks": size, "seed": seed, "method": method, "every": EVERY, "losses": losses})


def curve(rank: int, size: int, method: str, seed: int, steps: int) -> list[float]:
    """The held-out loss before the first step, and after every tenth."""
    torch.set_num_threads(1)
    training = Training(method, Workload(WorkloadSettings(), seed=seed, rank=rank, size=size))
    losses = [training.loss()]
    for index in range(steps):
        training.step(index)
        if (index + 1) % EVERY == 0:
            losses.append(training.loss())
    training.close()
    return losses


def steps_to(losses: Sequence[float], every: int, goal: float) -> float | None:
    """After how many steps a curve has come down to `goal`, on straight lines between its points; None: never."""
    for index, (before, after) in enumerate(itertools.pairwise(losses)):
        if after <= goal:
            return every * (index + (before - goal) / (before - after if before > after else 1.0))
    return None


# -- step times --------------------------------------------------------------------------------------------------------


class Run(rounds.Run):
    """One method on shaped hosts. A round is a multiple of the steps between two averages of local training."""

    def __init__(self, name: str, job: dict[str, Any]) -> None:
        super().__init__(name)
        workload = Workload(WorkloadSettings(), seed=0, rank=dist.get_rank(), size=dist.get_world_size())
        self.training, self.done = Training(name, workload), 0

    def step(self) -> None:
        """A step of training."""
        self.training.step(self.done)
        self.done += 1

    def warm_up(self) -> None:
        """OneBitAdamW begins with other messages."""
        for _ in range(40 if self.name == "OneBitAdamW" else SYNC_EVERY):
            self.step()

    def fit(self, seconds: float) -> None:
        """Whole rounds."""
        self.steps = SYNC_EVERY

    def details(self) -> dict[str, Any]:
        """Nothing else."""
        return {}


def record_steps(args: argparse.Namespace) -> None:
    """Every cell anew."""
    path = FOLDER / "time_to_loss_steps.jsonl"
    path.unlink(missing_ok=True)
    for size in args.ranks:
        for rate in args.rates:
            with netns.hosts(size, rate) as hosts:
                settings = {"rounds": args.rounds, "seconds": 1.0}
                for row in rounds.launch(hosts, args.methods, settings, 900, __file__):
                    add(path, {"ranks": size, "rate": rate, **row})


def check(args: argparse.Namespace) -> None:
    """A whole run of one method on shaped hosts, and what the product of steps and step time says."""
    ranks, rate, method = args.ranks[0], args.rates[0], args.methods[0]
    with netns.hosts(ranks, rate) as hosts:
        settings = {"rounds": args.steps // SYNC_EVERY, "seconds": 1.0}
        (row,) = rounds.launch(hosts, [method], settings, 3600, __file__)
    whole_s = sum(row["step_ms"]) * SYNC_EVERY / 1e3
    short = [r for r in read(FOLDER / "time_to_loss_steps.jsonl") if (r["ranks"], r["rate"]) == (ranks, rate)]
    product_s = next(rounds.median_ms(r) for r in short if r["hook"] == method) * args.steps / 1e3
    print(f"{method}, {ranks} hosts at {rate}, {args.steps} steps: {whole_s:.1f} s, the product is {product_s:.1f} s")


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = """# Time to a loss

Made by `benchmarks/time_to_loss.py`, which says how: the built-in GPT with 2.5 M parameters under AdamW, and the
seconds until the held-out loss of {exact} exact steps with the same seed. LocalSGD and DiLoCo average every {every}
steps in bf16. The mean over {seeds} seeds; in brackets the number of steps. A dash: not within {most} steps.

{tables}

![Loss over seconds](time_to_loss.svg)
"""


def write_page(args: argparse.Namespace) -> None:
    """time_to_loss.md and time_to_loss.svg."""
    curves, times = (read(FOLDER / f"time_to_loss_{name}.jsonl") for name in ("curves", "steps"))
    seeds = len({row["seed"] for row in curves})
    tables = "\n\n".join(table(curves, times, size) for size in sorted({row["ranks"] for row in times}))
    page = PAGE.format(exact=EXACT_STEPS, every=SYNC_EVERY, seeds=seeds, most=MOST_STEPS, tables=tables)
    (RESULTS / "time_to_loss.md").write_text(page)
    (RESULTS / "time_to_loss.svg").write_text(picture(curves, times, min(row["ranks"] for row in times)))
    print(tables)


def table(curves: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]], size: int) -> str:
    """One row per method, one column per link."""
    rates = list(dict.fromkeys(row["rate"] for row in times if row["ranks"] == size))
    lines = [f"| {size} hosts | {' | '.join(rates)} |", "|---" * (1 + len(rates)) + "|"]
    for method in METHODS:
        needed = steps_needed(curves, size, method)
        cells = []
        for rate in rates:
            own = [r for r in times if (r["ranks"], r["rate"], r["hook"]) == (size, rate, method) and "step_ms" in r]
            known = own and needed is not None
            cells.append(f"{rounds.median_ms(own[0]) * needed / 1e3:.1f} s ({needed:.0f})" if known else "-")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_needed(curves: Sequence[dict[str, Any]], size: int, method: str) -> float | None:
    """The mean over the seeds; None if one of them does not get there."""
    found = []
    for row in curves:
        if (row["ranks"], row["method"]) == (size, method):
            same = (r for r in curves if (r["ranks"], r["seed"], r["method"]) == (size, row["seed"], "plain"))
            goal = next(same)["losses"][EXACT_STEPS // EVERY]
            found.append(steps_to(row["losses"], row["every"], goal))
    reached = [steps for steps in found if steps is not None]
    return statistics.fmean(reached) if found and len(reached) == len(found) else None


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 400, 340, 50, 40, 50
COLOURS = ("#1f2937", "#2563c9", "#0e9f6e", "#d9722e", "#a11d33", "#7c3aed", "#0891b2", "#b45309", "#db2777")


def picture(curves: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]], size: int) -> str:
    """A panel per link: the mean loss over the seeds against seconds."""
    rates = list(dict.fromkeys(row["rate"] for row in times if row["ranks"] == size))
    style = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12" fill="#1f2937"'
    box = f'viewBox="0 0 {WIDTH * len(rates)} {HEIGHT + 40}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>',
        '<rect width="100%" height="100%" fill="#fcfcfd"/>',
    ]
    for index, rate in enumerate(rates):
        cell = {
            r["hook"]: rounds.median_ms(r) for r in times if (r["ranks"], r["rate"]) == (size, rate) and "step_ms" in r
        }
        parts += panel(curves, cell, size, rate, WIDTH * index)
    for index, method in enumerate(METHODS):
        x = LEFT + index * (WIDTH * len(rates) - LEFT) / len(METHODS)
        parts += [stroke(x, HEIGHT + 20, x + 14, HEIGHT + 20, COLOURS[index], 3), text(x + 18, HEIGHT + 24, method)]
    return "\n".join([*parts, "</svg>", ""])


def panel(curves: Sequence[dict[str, Any]], step_ms: dict[str, float], size: int, rate: str, left: float) -> list[str]:
    """One link. The axis ends where plain DDP has its 300 steps."""
    lines = {
        method: [statistics.fmean(each) for each in zip(*same, strict=True)]
        for method in step_ms
        if (same := [row["losses"] for row in curves if (row["ranks"], row["method"]) == (size, method)])
    }
    end_s = step_ms["plain"] * EXACT_STEPS / 1e3
    low, high = min(map(min, lines.values())) - 0.05, 4.0
    parts = [text(left + WIDTH / 2, 22, f"{size} hosts, {rate}: loss over seconds", "middle")]
    for share in (0.0, 0.5, 1.0):
        x, y = left + LEFT + share * (WIDTH - LEFT - 20), TOP + share * (HEIGHT - TOP - BOTTOM)
        parts.append(text(x, HEIGHT - BOTTOM + 18, f"{share * end_s:.0f}", "middle"))
        parts.append(text(left + LEFT - 6, y + 4, f"{high - share * (high - low):.1f}", "end"))
        parts.append(stroke(left + LEFT, y, left + WIDTH - 20, y, "#e8eaee"))
    for method, losses in lines.items():
        points = [
            (
                left + LEFT + seconds / end_s * (WIDTH - LEFT - 20),
                TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM),
            )
            for index, loss in enumerate(losses)
            if (seconds := index * EVERY * step_ms[method] / 1e3) <= end_s and loss <= high
        ]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[METHODS.index(method)]
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return parts


# -- files and the command line ----------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, none if there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, row: dict[str, Any]) -> None:
    """Append a row."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(time.strftime("%H:%M:%S"), {key: value for key, value in row.items() if key != "losses"}, flush=True)


PHASES: dict[str, Callable[[argparse.Namespace], None]] = {
    "curves": record_curves,
    "steps": record_steps,
    "check": check,
    "page": write_page,
}


def main() -> None:
    """One phase, or one rank of `steps`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", nargs="?", choices=PHASES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=MOST_STEPS)
    rounds.add_arguments(parser, rounds=3)
    args = parser.parse_args()
    rounds.run_rank(args, Run) if args.rank is not None else PHASES[args.phase](args)


if __name__ == "__main__":
    main()
