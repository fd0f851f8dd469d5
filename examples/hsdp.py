"""HSDP with gradwire: shards inside a node, and 4 bits per value on the slow link between nodes.

torchrun --nproc-per-node 4 examples/hsdp.py --replicas int4
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradwire


def main() -> None:
    """Fit a random teacher on two nodes of two ranks, then say what the hook did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="int4", help="how gradients are averaged across nodes")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher = nn.Linear(64, 8)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    shape = (args.nodes, dist.get_world_size() // args.nodes)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    hook = gradwire.hsdp(model, mesh, units=model[::2], replicas=args.replicas)  # calls fully_shard too
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
