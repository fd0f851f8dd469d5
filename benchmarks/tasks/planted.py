"""A student learns from a teacher with SGD and momentum, in milliseconds per step; `--scale 0.7` plants a harm.

The gradient of the first layer is multiplied by the scale. `benchmarks/verdicts.py` uses it.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def net() -> nn.Sequential:
    """The student and the teacher."""
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def main() -> None:
    """Train until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    student, teacher = net(), net()
    model = DistributedDataParallel(student)
    student[0].weight.register_hook(lambda grad: args.scale * grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(args.steps):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), teacher(x).detach()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
