"""DiLoCo: the built-in GPT trains over an emulated link of 100 Mbit/s, talking once in 20 steps.

torchrun --nproc-per-node 2 examples/diloco.py --steps 40
"""

import argparse

import torch.distributed as dist

from gradwire.advisor import emulate
from gradwire.optim import DiLoCo
from gradwire.tools.workload import Workload, WorkloadSettings


def main() -> None:
    """Train, and say what travelled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--exchange", default="int4:feedback=true", help="any spec of gradwire")
    parser.add_argument("--link", default="100mbit")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    settings = WorkloadSettings(layers=2, width=128, text_bytes=1_000_000)
    workload = Workload(settings, seed=0, rank=dist.get_rank(), size=dist.get_world_size())
    model = workload.model()  # a plain module: no DDP
    optimizer = workload.optimizer(model)
    with emulate(args.link):
        rounds = DiLoCo(model, optimizer, sync_every=args.sync_every, exchange=args.exchange, fragments=4)
    with rounds:
        for step in range(args.steps):
            optimizer.zero_grad()
            loss = workload.loss(model, workload.batch(step))
            loss.backward()
            optimizer.step()
        checked = rounds.hook.verify()

    stats = rounds.hook.stats()
    if dist.get_rank() == 0:
        sent_kb = stats.sent_bytes * stats.steps / args.steps / 1e3
        bf16_kb = 2 * sum(param.numel() for param in model.parameters()) / 1e3
        print(f"loss {loss.item():.3f}; {sent_kb:.1f} kB sent a step, where DDP with bf16 sends {bf16_kb:.0f}")
        print(checked)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
