"""What ranks run in test_ranks.py."""

import os
import signal
import sys

import torch
import torch.distributed as dist


def add_up(rank, size, job, report):
    total = torch.tensor([float(rank + job["start"])])
    dist.all_reduce(total)
    report(0.5, "adding")
    print("this must not be taken for a message", flush=True)
    return {"rank": rank, "total": float(total), "threads": torch.get_num_threads()}


def fail_on_rank_1(rank, size, job, report):
    if rank == 1:
        raise ValueError("no such luck")
    dist.all_reduce(torch.ones(1))


def die_on_rank_1(rank, size, job, report):
    if rank == 1:
        print("rank 1 was here", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
