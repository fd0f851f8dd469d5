"""FSDP2 with gradwire: gradients in 8 bits and parameters in 16, with one line more than without.

torchrun --nproc-per-node 2 examples/fsdp2.py --hook int8 --gather bf16
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire


def main() -> None:
    """Fit a random teacher, then say what the hook did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="int8", help="how gradients are reduce-scattered")
    parser.add_argument("--gather", default="bf16", help="how parameters are gathered")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher = nn.Linear(64, 8)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    hook = gradwire.register(model, args.hook, gather=args.gather)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(args.steps):
        inputs = torch.randn(32, 64, generator=data)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    checked, stats = hook.verify(), hook.stats_by_part()
    if dist.get_rank() == 0:
        sent = ", ".join(f"{part.sent_bytes / 1e3:.1f} kB of {name}" for name, part in stats.items())
        print(f"loss {loss.item():.4f}, sent per step: {sent}")
        print(checked)
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
