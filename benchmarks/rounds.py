"""What the benchmarks on shaped hosts share: ranks in namespaces, and names that are measured by turns.

All names of a cell run in the same processes, one after the other, round after round, so that a slow minute of the
machine hits them all, and so that the times of one round can be compared with each other.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import netns

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}
"""For every hook alike: glibc's own habit depends on what was freed before, and moves a step by 10% either way."""
LAYERS, WIDTH, BATCH = 8, 1024, 64


def mlp() -> nn.Sequential:
    """8.4M parameters, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


# -- the launcher ------------------------------------------------------------------------------------------------------


def launch(
    hosts: Sequence[str],
    hooks: Sequence[str],
    settings: dict[str, Any],
    limit_s: float,
    script: str,
    env: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """One process per host; what rank 0 measured, or what became of it. `settings` and `env` are for the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"hooks": list(hooks), "ranks": len(hosts), **settings}))
        processes = [start_rank(host, rank, job, script, env) for rank, host in enumerate(hosts)]
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


def start_rank(host: str, rank: int, job: Path, script: str, more: Mapping[str, str]) -> subprocess.Popen[str]:
    """A rank in its namespace, on one core."""
    command = [*netns.on_host(host, rank), sys.executable, script]
    env = {**os.environ, **KEEP_MEMORY, "GLOO_SOCKET_IFNAME": netns.INTERFACE, "OMP_NUM_THREADS": "1", **more}
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


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options that all of these scripts have."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=2.0, help="time a name gets in a round")
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)


# -- one rank ----------------------------------------------------------------------------------------------------------


class Run(ABC):
    """One name on a model of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.steps = name, 1
        self.failed: str | None = None
        self.error: float | None = None
        self.times: list[float] = []
        self.sent: list[float] = []
        self.cpu: list[float] = []

    @abstractmethod
    def step(self) -> None:
        """Forward and backward."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """What is recorded besides times, bytes and the error."""

    def warm_up(self) -> None:
        """Before anything is measured."""
        for _ in range(2):
            self.step()

    def fit(self, seconds: float) -> None:
        """Fit the number of steps of a round to the time there is."""
        self.steps = max(1, min(40, int(seconds / self.timed(2)[0])))

    def timed(self, steps: int) -> tuple[float, float, float]:
        """Seconds, sent bytes and seconds of CPU time per step; the slowest rank counts, and this one's CPU time."""
        dist.barrier()
        sent, began, used = sent_bytes(), time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        ended = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(ended, dist.ReduceOp.MAX)  # behind it the last bytes have left, too
        return float(ended) / steps, (sent_bytes() - sent) / steps, (time.process_time() - used) / steps

    def measure(self) -> None:
        """One round."""
        if not self.failed:
            seconds, moved, used = self.timed(self.steps)
            self.times.append(seconds)
            self.sent.append(moved)
            self.cpu.append(used)

    def record(self) -> dict[str, Any]:
        """What goes into the file."""
        if self.failed:
            return {"hook": self.name, "failed": self.failed}
        times_ms = [1e3 * value for value in self.times]
        sent_mb, cpu_ms = statistics.median(self.sent) / 1e6, 1e3 * statistics.median(self.cpu)
        measured = {"step_ms": times_ms, "cpu_ms": cpu_ms, "sent_mb": sent_mb, "error": self.error}
        return {"hook": self.name, **measured, **self.details()}


def run_rank(args: argparse.Namespace, make: Callable[[str, dict[str, Any]], Run]) -> None:
    """Be one rank: make and prepare every run, and measure them by turns."""
    job = json.loads(Path(args.job).read_text())
    store = Path(args.job).with_name("store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=args.rank, world_size=job["ranks"])
    runs = [make(hook, job) for hook in job["hooks"]]
    for run in (run for run in runs if not run.failed):
        run.warm_up()
        run.fit(job["seconds"])
    for _ in range(job["rounds"]):
        for run in runs:
            run.measure()
    if args.rank == 0:
        text = "".join(json.dumps(run.record()) + "\n" for run in runs)
        Path(args.job).with_name("records.jsonl").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


def sent_bytes() -> int:
    """The interface's own counter."""
    return int(Path(f"/sys/class/net/{netns.INTERFACE}/statistics/tx_bytes").read_text())


# -- what tables say ---------------------------------------------------------------------------------------------------


def median_ms(row: dict[str, Any]) -> float:
    """The median step."""
    return statistics.median(row["step_ms"])


def faster(row: dict[str, Any], base: dict[str, Any] | None) -> list[float]:
    """How many times as fast as the baseline it was, in each round."""
    if base is None or "step_ms" not in base:
        return []
    return [other / own for own, other in zip(row["step_ms"], base["step_ms"], strict=True)]
