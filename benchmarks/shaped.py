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
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
import netns
from gradwire.engine.fingerprint import fingerprint

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
PASSED_ON = ("rounds", "seconds", "bucket_mb")
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}
"""For every hook alike: glibc's own habit depends on what was freed before, and moves a step by 10% either way."""
LAYERS, WIDTH, BATCH = 8, 1024, 64
ONE_BUCKET = 1000
"""With buckets of so many MB the whole model is one: where torch's PowerSGD works on gloo."""


def main() -> None:
    """Launch the cells, or be one rank of one."""
    args = parse_args()
    if args.rank is not None:
        run_rank(args)
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="time a hook gets in a round")
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_cell(ranks: int, rate: str | None, args: argparse.Namespace) -> list[dict]:
    """All hooks on `ranks` hosts at `rate`."""
    with netns.hosts(ranks, rate) as names:
        records = launch(names, args.hooks, args, limit_s=1800)
        for hook in args.risky:
            records += launch(names, [hook], args, limit_s=90)
    return [{"ranks": ranks, "rate": rate, "bucket_mb": args.bucket_mb, **record} for record in records]


def launch(
    names: list[str],
    hooks: list[str],
    args: argparse.Namespace,
    limit_s: float,
    script: str = __file__,
    passed_on: tuple[str, ...] = PASSED_ON,
) -> list[dict]:
    """One process a name; what rank 0 measured, or what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        settings = {"hooks": hooks, "ranks": len(names)} | {key: getattr(args, key) for key in passed_on}
        job.write_text(json.dumps(settings))
        processes = [start_rank(name, rank, job, script) for rank, name in enumerate(names)]
        try:
            deadline = time.monotonic() + limit_s
            texts = [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[0] for process in processes]
        except subprocess.TimeoutExpired:
            return [{"hook": hook, "failed": f"hangs (stopped after {limit_s:.0f} s)"} for hook in hooks]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            text = next((text for text, process in zip(texts, processes, strict=True) if process.returncode), "")
            codes = {process.returncode for process in processes} - {0}
            return [{"hook": hook, "failed": f"exit code {min(codes)}: {last_line(text)}"} for hook in hooks]
        return [json.loads(line) for line in Path(folder, "records.jsonl").read_text().splitlines()]


def start_rank(name: str, rank: int, job: Path, script: str) -> subprocess.Popen[str]:
    """A rank in its namespace, on one core."""
    command = [*netns.on_host(name, rank), sys.executable, script]
    env = {**os.environ, **KEEP_MEMORY, "GLOO_SOCKET_IFNAME": netns.INTERFACE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--rank", str(rank), "--job", str(job)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def last_line(text: str) -> str:
    """The line that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "what():" in line or "mismatch" in line]
    return (lines or ["no message"])[-1][:160]


# -- one rank --------------------------------------------------------------------------------------------------------


def run_rank(args: argparse.Namespace) -> None:
    """Measure every hook in turn, round after round."""
    job = json.loads(Path(args.job).read_text())
    store = Path(args.job).with_name("store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=args.rank, world_size=job["ranks"])
    runs = [Run(hook, job["bucket_mb"]) for hook in job["hooks"]]
    for run in runs:
        run.prepare(job["seconds"])
    for _ in range(job["rounds"]):
        for run in runs:
            run.measure()
    if args.rank == 0:
        text = "".join(json.dumps(run.record()) + "\n" for run in runs)
        Path(args.job).with_name("records.jsonl").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


class Run:
    """One hook on a model of its own."""

    def __init__(self, name: str, bucket_mb: float | None) -> None:
        self.name, self.failed = name, None
        hook, _, own_mb = name.partition("@")
        bucket_mb = float(own_mb) if own_mb else bucket_mb
        if bucket_mb is not None and bucket_mb >= ONE_BUCKET:  # DDP's first bucket is a small one otherwise
            dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_mb)
        torch.manual_seed(1 + dist.get_rank())
        self.data = torch.randn(BATCH, WIDTH)
        self.times: list[float] = []
        self.sent: list[float] = []
        self.error, self.identical, self.steps = None, None, 1
        self.state = None
        try:
            self.state = register(self.model, hook)
        except Exception as error:
            self.failed = f"refused: {type(error).__name__}: {error}"

    def prepare(self, seconds: float) -> None:
        """Warm up, measure the error of the mean, and fit the number of steps to the time there is."""
        if self.failed:
            return
        for _ in range(2):
            self.step()
        mean = self.exact_mean()
        self.step()
        grads = torch.cat([param.grad.flatten() for param in self.model.parameters()]).double()
        self.error = float((grads - mean).norm() / mean.norm())
        prints = [torch.zeros_like(fingerprint(grads)) for _ in range(dist.get_world_size())]
        dist.all_gather(prints, fingerprint(grads))
        self.identical = len({int(value) for value in prints}) == 1
        self.steps = max(1, min(40, int(seconds / self.timed(2)[0])))

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

    def timed(self, steps: int) -> tuple[float, float]:
        """Seconds and sent bytes a step; the slowest rank counts."""
        dist.barrier()
        sent, began = sent_bytes(), time.perf_counter()
        for _ in range(steps):
            self.step()
        ended = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(ended, dist.ReduceOp.MAX)  # behind it the last bytes have left, too
        return float(ended) / steps, (sent_bytes() - sent) / steps

    def measure(self) -> None:
        """One round."""
        if not self.failed:
            seconds, moved = self.timed(self.steps)
            self.times.append(seconds)
            self.sent.append(moved)

    def record(self) -> dict:
        """What goes into the file."""
        if self.failed:
            return {"hook": self.name, "failed": self.failed}
        return {
            "hook": self.name,
            "step_ms": [1e3 * value for value in self.times],
            "sent_mb": statistics.median(self.sent) / 1e6,
            "error": self.error,
            "identical": self.identical,
            "kept_mb": kept_bytes(self.state) / 1e6,
        }


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


def sent_bytes() -> int:
    """The interface's own counter."""
    return int(Path(f"/sys/class/net/{netns.INTERFACE}/statistics/tx_bytes").read_text())


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
    f"{'hook':<24}{'step ms':>8}  {'min-max':<11}{'vs plain':>9}{'vs fp16':>9}{'x limit':>9}{'MB sent':>9}{'error':>9}"
    f"{'MB kept':>9}  same bits"
)
"""Median step; times faster than plain DDP and than torch's fp16; multiple of max(noop step, wire time)."""


def line(row: dict, medians: dict[str, float], rate: str) -> str:
    """One hook of the table."""
    step = medians[row["hook"]]
    spread = f"{min(row['step_ms']):.0f}-{max(row['step_ms']):.0f}"
    wire_ms = 0.0 if rate == "none" else row["sent_mb"] * 8e9 / netns.bits_per_s(rate)
    limit = step / max(medians.get("noop", step), wire_ms)
    faster = f"{ratio(medians, 'plain', step):>9}{ratio(medians, 'torch:FP16_COMPRESS', step):>9}"
    same = "yes" if row["identical"] else "no"
    moved = f"{row['sent_mb']:>9.2f}{row['error']:>9.1e}{row['kept_mb']:>9.2f}  {same}"
    return f"{row['hook']:<24}{step:>8.1f}  {spread:<11}{faster}{limit:>9.2f}{moved}"


def ratio(medians: dict[str, float], base: str, step: float) -> str:
    """How many times faster than `base`."""
    return f"{medians[base] / step:.2f}" if base in medians else "-"


if __name__ == "__main__":
    main()
