"""Step time, bytes and error of every hook on shaped hosts, next to torch's own hook of the same name. Needs root.

    python benchmarks/shaped.py --ranks 2 4 --rates 100mbit 1gbit 10gbit none --out shaped.jsonl

All hooks of a cell run in the same processes, one after the other, round after round, so that a slow minute of the
machine hits them all. torch's hooks that are known to hang or abort get processes and a time limit of their own.

Buckets are what each hook makes of DDP's default: 25 MB, smaller ones under gradwire (see `gradwire.models.buckets`).
A size after an @, as in plain@4, is DDP's bucket_cap_mb for one hook, and --bucket-mb for all others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms import ddp_comm_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
import netns
import rounds
from gradwire.engine.fingerprint import fingerprint
from rounds import BATCH, LAYERS, WIDTH

OURS = (
    "exact",
    "noop",
    "fp16",
    "bf16",
    "bf16:accumulate=wire",
    "int8",
    "int4",
    "int3",
    "int2",
    "sign",
    "powersgd:rank=1",
    "powersgd:rank=4",
)
SAFE = ("plain", "plain@4", "torch:FP16_COMPRESS", "torch:FP16_COMPRESS@4", "torch:BF16_COMPRESS")
RISKY = (
    "torch:QUANTIZE_PER_TENSOR",
    "torch:QUANTIZE_PER_CHANNEL",
    "torch:POWER_SGD",
    "torch:POWER_SGD_RANK2",
    "torch:BATCHED_POWER_SGD",
    "torch:BATCHED_POWER_SGD_RANK2",
)
ONE_BUCKET = 1000
"""With buckets of so many MB the whole model is one: where torch's PowerSGD works on gloo."""


def main() -> None:
    """Launch the cells, or be one rank of one."""
    args = parse_args()
    if args.rank is not None:
        rounds.run_rank(args, Run)
        return
    netns.check_usable()
    records = []
    for ranks in args.ranks:
        for rate in args.rates:
            cell = run_cell(ranks, None if rate == "none" else rate, args)
            records += cell
            print_cell(ranks, rate, args.bucket_mb, cell)
            if args.out:
                Path(args.out).write_text("".join(json.dumps(record) + "\n" for record in records))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit", "none"])
    parser.add_argument("--hooks", nargs="+", default=[*SAFE, *OURS])
    parser.add_argument("--risky", nargs="*", default=list(RISKY), help="hooks that get processes of their own")
    parser.add_argument("--bucket-mb", type=float, help="DDP's bucket_cap_mb, for every hook without its own")
    rounds.add_arguments(parser, rounds=7)
    return parser.parse_args()


def run_cell(ranks: int, rate: str | None, args: argparse.Namespace) -> list[dict]:
    """All hooks on `ranks` hosts at `rate`."""
    with netns.hosts(ranks, rate) as names:
        settings = {"rounds": args.rounds, "seconds": args.seconds, "bucket_mb": args.bucket_mb}
        records = rounds.launch(names, args.hooks, settings, 1800, __file__)
        for hook in args.risky:
            records += rounds.launch(names, [hook], settings, 90, __file__)
    return [{"ranks": ranks, "rate": rate, "bucket_mb": args.bucket_mb, **record} for record in records]


# -- one rank --------------------------------------------------------------------------------------------------------


class Run(rounds.Run):
    """One hook on a model of its own."""

    def __init__(self, name: str, job: dict) -> None:
        super().__init__(name)
        hook, _, own_mb = name.partition("@")
        bucket_mb = float(own_mb) if own_mb else job["bucket_mb"]
        if bucket_mb is not None and bucket_mb >= ONE_BUCKET:  # DDP's first bucket is a small one otherwise
            dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40
        self.model = DistributedDataParallel(rounds.mlp(), bucket_cap_mb=bucket_mb)
        torch.manual_seed(1 + dist.get_rank())
        self.data = torch.randn(BATCH, WIDTH)
        self.identical: bool | None = None
        self.state = None
        try:
            self.state = register(self.model, hook)
        except Exception as error:
            self.failed = f"refused: {type(error).__name__}: {error}"

    def warm_up(self) -> None:
        """Two steps; then the error of the mean is measured."""
        super().warm_up()
        mean = self.exact_mean()
        self.step()
        grads = torch.cat([param.grad.flatten() for param in self.model.parameters()]).double()
        self.error = float((grads - mean).norm() / mean.norm())
        prints = [torch.zeros_like(fingerprint(grads)) for _ in range(dist.get_world_size())]
        dist.all_gather(prints, fingerprint(grads))
        self.identical = len({int(value) for value in prints}) == 1

    def exact_mean(self) -> torch.Tensor:
        """The mean of the local gradients, in float64."""
        self.model.zero_grad()
        self.model.module(self.data).square().mean().backward()
        mean = torch.cat([param.grad.flatten() for param in self.model.parameters()]).double()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    def step(self) -> None:
        """Forward and backward."""
        self.model.zero_grad()
        self.model(self.data).square().mean().backward()

    def details(self) -> dict:
        """Whether all ranks got the same bits, and what the hook keeps."""
        return {"identical": self.identical, "kept_mb": kept_bytes(self.state) / 1e6}


def register(model: DistributedDataParallel, name: str) -> object:
    """Ours by spec, torch's by the name of its DDPCommHookType; what keeps the hook's state."""
    if name.startswith("torch:"):
        kind = torch_hooks.DDPCommHookType[name.removeprefix("torch:")]
        if "POWER_SGD" in kind.name:
            state = torch_hooks.powerSGD.PowerSGDState(None, 2 if "RANK2" in kind.name else 1, start_powerSGD_iter=2)
            function = "batched_powerSGD_hook" if "BATCHED" in kind.name else "powerSGD_hook"
            model.register_comm_hook(state, getattr(torch_hooks.powerSGD, function))
            return state
        torch_hooks.register_ddp_comm_hook(kind, model, None)
        return None
    return None if name == "plain" else gradwire.register(model, name)


def kept_bytes(state: object) -> int:
    """What a hook keeps between steps, besides the gradients."""
    if isinstance(state, gradwire.Hook):
        saved = state.state_dict()
        kept = [*saved["residuals"].values(), *(q for own in saved["memory"].values() for q in own.values())]
    else:
        dicts = (getattr(state, name, {}) for name in ("error_dict", "p_memory_dict", "q_memory_dict"))
        kept = [tensor for own in dicts for tensor in own.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


# -- the table -------------------------------------------------------------------------------------------------------


def print_cell(ranks: int, rate: str, bucket_mb: float | None, cell: list[dict]) -> None:
    """The cell as a table."""
    medians = {row["hook"]: statistics.median(row["step_ms"]) for row in cell if "step_ms" in row}
    buckets = "default buckets" if bucket_mb is None else f"buckets of {bucket_mb:g} MB"
    print(f"\n{ranks} hosts, {rate}: {LAYERS} x Linear({WIDTH}, {WIDTH}), batch {BATCH}, {buckets}")
    print(HEADER)
    for row in cell:
        print(f"{row['hook']:<24}{row['failed']}" if "failed" in row else line(row, medians, rate))
    sys.stdout.flush()


HEADER = (
    f"{'hook':<24}{'step ms':>8}  {'min-max':<11}{'vs plain':>9}{'vs fp16':>9}{'x limit':>9}{'CPU ms':>8}"
    f"{'MB sent':>9}{'error':>9}{'MB kept':>9}  same bits"
)
"""Median step; times faster than plain DDP and than torch's fp16; multiple of max(noop step, wire time);
CPU time of a rank's threads per step, without what the kernel does for its packets in another process's time."""


def line(row: dict, medians: dict[str, float], rate: str) -> str:
    """One hook of the table."""
    step = medians[row["hook"]]
    spread = f"{min(row['step_ms']):.0f}-{max(row['step_ms']):.0f}"
    wire_ms = 0.0 if rate == "none" else row["sent_mb"] * 8e9 / netns.bits_per_s(rate)
    limit = step / max(medians.get("noop", step), wire_ms)
    faster = f"{ratio(medians, 'plain', step):>9}{ratio(medians, 'torch:FP16_COMPRESS', step):>9}"
    same = "yes" if row["identical"] else "no"
    moved = f"{row['sent_mb']:>9.2f}{row['error']:>9.1e}{row['kept_mb']:>9.2f}  {same}"
    return f"{row['hook']:<24}{step:>8.1f}  {spread:<11}{faster}{limit:>9.2f}{row['cpu_ms']:>8.1f}{moved}"


def ratio(medians: dict[str, float], base: str, step: float) -> str:
    """How many times faster than `base`."""
    return f"{medians[base] / step:.2f}" if base in medians else "-"


if __name__ == "__main__":
    main()
