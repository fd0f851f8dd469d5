"""A DDP script with gradwire: one line more than without.

torchrun --nproc-per-node 2 examples/first_hook.py --hook bf16
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main() -> None:
    """Fit a random teacher, then say what the hook did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="bf16", help="a spec, such as int4 or fp16:accumulate=wire")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher = nn.Linear(64, 8)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)))
    hook = gradwire.register(model, args.hook)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(args.steps):
        inputs = torch.randn(32, 64, generator=data)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    checked, stats = hook.verify(), hook.stats()
    if dist.get_rank() == 0:
        sent_kb, waited_ms = stats.sent_bytes / 1e3, 1e3 * stats.wait_s
        print(f"loss {loss.item():.4f}, {sent_kb:.1f} kB sent a step, waited {waited_ms:.1f} ms a step")
        print(checked)
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
