"""Accelerate with gradwire: one line instead of accelerator.prepare, or no change at all under `gradwire run`.

torchrun --nproc-per-node 2 examples/accelerate_ddp.py --hook bf16
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_ddp.py --hook bf16
gradwire run --hook bf16 --nproc 2 examples/accelerate_ddp.py       without --hook: knows nothing of gradwire
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire


def main() -> None:
    """Fit a random teacher, then say what the hook did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", help="register this one, such as bf16 (default: train without gradwire)")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs, teacher = torch.randn(64 * args.steps, 64), nn.Linear(64, 8)
    data = DataLoader(TensorDataset(inputs, teacher(inputs).detach()), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    parts = model, torch.optim.AdamW(model.parameters(), lr=1e-2), data
    if args.hook:
        prepared = gradwire.integrations.accelerate.prepare(accelerator, *parts, hook=args.hook)  # the one line
    else:
        prepared = (*accelerator.prepare(*parts), None)
    model, optimizer, data, hook = prepared

    for batch, wanted in data:
        loss = nn.functional.mse_loss(model(batch), wanted)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

    accelerator.print(f"loss {loss.item():.4f}")
    if hook is not None:
        accelerator.print(hook.verify())
        hook.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
