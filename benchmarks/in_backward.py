"""Step in backward against "hook, then optimizer.step()": the time of a step, and the peak memory of gradients.

    python benchmarks/in_backward.py --hook bf16 --steps 60
    python benchmarks/in_backward.py --link 1gbit      (as root: two hosts in network namespaces)

Both ways train copies of one model on the same data, a step of one after a step of the other, so that whatever else the
machine does falls on both. The ratio is between neighbours; its spread is from the lower to the upper quartile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import netns
from gradwire.engine.observers import Observer
from gradwire.optim import step_in_backward
from gradwire.testing import spawn_ranks

RANKS = 2
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD+momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


class Run:
    """A model in training, one way or the other."""

    def __init__(self, args: argparse.Namespace, optimizer: str, inside: bool, view: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
        self.model = DistributedDataParallel(
            nn.Sequential(*layers), gradient_as_bucket_view=view, bucket_cap_mb=args.bucket_mb
        )
        self.hook = gradwire.register(self.model, args.hook)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        if inside:
            step_in_backward(self.model, self.optimizer, set_to_none=True)
        self.data = torch.Generator().manual_seed(dist.get_rank())
        self.batch, self.width = args.batch, args.width

    def step(self) -> float:
        """One step of training; milliseconds."""
        x = torch.randn(self.batch, self.width, generator=self.data)
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        return (time.perf_counter() - began) * 1e3

    def peak_bytes(self) -> int:
        """The most memory that gradients and buckets held in a step, looked at whenever a gradient is made."""
        seen: list[int] = []
        buckets: dict[int, int] = {}

        class Sizes(Observer):
            def before_mean(self, bucket: gradwire.Bucket, first: bool) -> None:
                buckets[bucket.flat.untyped_storage().data_ptr()] = bucket.flat.untyped_storage().nbytes()

        self.hook.observers.insert(0, Sizes())
        self.step()
        handles = [
            param.register_post_accumulate_grad_hook(lambda _: seen.append(_bytes(self.model.parameters(), buckets)))
            for param in self.model.parameters()
        ]
        self.step()
        seen.append(_bytes(self.model.parameters(), buckets))
        for handle in handles:
            handle.remove()
        self.hook.observers.pop(0)
        return max(seen)


def _bytes(params: object, buckets: dict[int, int]) -> int:
    """Of all gradients and buckets, each piece of memory counted once."""
    held = dict(buckets)
    for param in params:  # type: ignore[attr-defined]
        grad: Tensor | None = param.grad
        if grad is not None:
            held[grad.untyped_storage().data_ptr()] = grad.untyped_storage().nbytes()
    return sum(held.values())


def rank_main(rank: int, size: int, args: argparse.Namespace) -> list[dict[str, object]]:
    """Every optimizer, with and without gradients as views of the buckets."""
    rows = []
    for name in OPTIMIZERS:
        for view in (False, True):
            runs = [Run(args, name, inside, view) for inside in (False, True)]
            for run in runs:
                run.step(), run.step()
            pairs = [[run.step() for run in (runs if step % 2 else runs[::-1])] for step in range(args.steps)]
            after, inside = zip(*(pair if step % 2 else pair[::-1] for step, pair in enumerate(pairs)), strict=True)
            same = all(map(torch.equal, *(run.model.parameters() for run in runs)))
            peaks = [run.peak_bytes() / 2**20 for run in runs]
            rows.append(
                {"optimizer": name, "view": view, "after": after, "inside": inside, "same": same, "peak_mb": peaks}
            )
            for run in runs:
                run.hook.close()
    return rows


HEADER = (
    f"{'optimizer':<14}{'view':<7}{'after ms':>9}{'inside ms':>10}{'ratio':>7}  {'quartiles':<13}{'MB after':>9}"
    f"{'MB inside':>10}  same bits"
)


def print_rows(args: argparse.Namespace, rows: list[dict]) -> None:
    """The table."""
    print(
        f"{args.layers} x Linear({args.width}, {args.width}), batch {args.batch}, {RANKS} ranks, hook {args.hook}, "
        f"link {args.link or 'local'}, {args.steps} steps each way"
    )
    print(HEADER)
    for row in rows:
        ratios = [b / a for a, b in zip(row["after"], row["inside"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        times = f"{statistics.median(row['after']):>9.1f}{statistics.median(row['inside']):>10.1f}"
        memory = f"{row['peak_mb'][0]:>9.1f}{row['peak_mb'][1]:>10.1f}"
        print(
            f"{row['optimizer']:<14}{row['view']!s:<7}{times}{middle:>7.2f}  {f'{low:.2f}-{high:.2f}':<13}{memory}  "
            f"{'yes' if row['same'] else 'NO'}"
        )


def shaped(args: argparse.Namespace) -> list[dict]:
    """The same on hosts in network namespaces: this file again, once in each."""
    with netns.hosts(RANKS, args.link) as hosts:
        environment = {**os.environ, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": str(RANKS)}
        environment |= {"GLOO_SOCKET_IFNAME": netns.INTERFACE, "TP_SOCKET_IFNAME": netns.INTERFACE}
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, *sys.argv, "--child"],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            )
            for rank, host in enumerate(hosts)
        ]
        out = processes[0].communicate()[0]
        for process in processes:
            process.wait()
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


def child(args: argparse.Namespace) -> None:
    """A rank in its namespace; rank 0 prints its rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = rank_main(dist.get_rank(), RANKS, args)
    print(json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="bf16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--bucket-mb", type=float, default=2.0)
    parser.add_argument("--link", help="emulate it, such as 1gbit; as root")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    rows = shaped(args) if args.link else spawn_ranks(RANKS, rank_main, args, timeout_s=3600)[0]
    print_rows(args, rows)


if __name__ == "__main__":
    main()
