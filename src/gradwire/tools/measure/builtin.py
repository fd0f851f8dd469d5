"""The built-in GPT as a DDP script: `python -m` this module, with STEPS [BUCKET_MB], under any launcher.

Under `gradwire compare` the number of the repeat is its seed.
"""

import os
import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.tools.workload import Workload, WorkloadSettings


def main(steps: int, bucket_mb: float | None = None) -> None:
    """Train so many steps under plain DDP."""
    dist.init_process_group("gloo")
    seed = int(os.environ.get("GRADWIRE_SEED", "0"))
    workload = Workload(WorkloadSettings(), seed=seed, rank=dist.get_rank(), size=dist.get_world_size())
    model = DistributedDataParallel(workload.model(), bucket_cap_mb=bucket_mb)
    optimizer = workload.optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        workload.loss(model, workload.batch(step)).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:]))
