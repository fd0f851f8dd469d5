"""A program that never closes its hook. Run as `forgetful.py rank size store ending`."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

EXIT_CODES = {"nothing": 0, "destroy": 0, "in flight": 0, "raise": 5, "err": 1, "go on": 0}


def main(rank: int, size: int, store: str, ending: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    model = DDP(torch.nn.Linear(64, 64))
    hook = gradwire.register(model, "bf16:shots=two")
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    if ending == "destroy":
        dist.destroy_process_group()
    if ending == "raise":
        raise SystemExit(EXIT_CODES[ending])
    if ending == "err":
        raise ValueError("my own mistake")
    if ending == "go on":
        try:
            model(torch.ones(2, 64)).sum().backward()
        except RuntimeError as error:
            print(error)
    if ending == "in flight":  # and no rank waits for it or takes part
        hook.mean(gradwire.make_bucket([torch.ones(1 << 20)]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
