"""A script of `test_accelerate.py`: Accelerate shards a model with FSDP2, and gradwire compresses what it sends."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

import gradwire


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100, cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP  # Accelerate does this on accelerators only
    accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    hook = gradwire.register(model, "int8", gather="bf16")
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(hook.verify())
    dist.barrier()
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
