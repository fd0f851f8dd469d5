"""Mixed precision with a loss scale, and a hook that remembers: tell the hook when the scale changes.

torchrun --nproc-per-node 2 examples/amp.py --hook powersgd:rank=4
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main() -> None:
    """Fit a random teacher under autocast and a GradScaler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="powersgd:rank=4", help="any hook; those with feedback keep gradients' units")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher = nn.Linear(64, 8)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)))
    hook = gradwire.register(model, args.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=20)

    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(args.steps):
        inputs = torch.randn(32, 64, generator=data)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # skips the step if the average has inf or NaN, which it has on all ranks or on none
        old = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() != old:
            hook.scale_state(scaler.get_scale() / old)  # what the hook owes is in the unit of scaled gradients

    checked = hook.verify()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}, loss scale {scaler.get_scale():g}")
        print(checked)
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
