"""A job that checkpoints, and restarts when a rank fails: the final parameters are those of an undisturbed run.

torchrun --nproc-per-node 2 examples/elastic_restart.py

With a folder for checkpoints, and a rank that is killed on the way:
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else gloo finds the addresses of the first attempt in the store
torchrun --standalone --max-restarts 3 --nproc-per-node 2 examples/elastic_restart.py --folder /tmp/run1 --fail-at 17
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main() -> None:
    """Fit a random teacher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="int4:exempt=none,feedback=true", help="any hook")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="where to save every 5 steps, and to continue from")
    parser.add_argument("--fail-at", type=int, help="kill the last rank at this step, if the job has not restarted yet")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher = nn.Linear(64, 8)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hook = gradwire.register(model, args.hook)

    first = latest(args.folder, size)
    if first > 0:
        saved = torch.load(args.folder / f"{first}-{rank}.pt")
        for part, state in zip((model, optimizer, hook), saved, strict=True):
            part.load_state_dict(state)
    for step in range(first, args.steps):
        if (step, rank) == (args.fail_at, size - 1) and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * size + rank))  # the data of this step
        optimizer.zero_grad()
        (model(x) - teacher(x)).square().mean().backward()
        optimizer.step()
        if args.folder and (step + 1) % 5 == 0:
            save([part.state_dict() for part in (model, optimizer, hook)], args.folder / f"{step + 1}-{rank}.pt")

    checked = hook.verify()
    if rank == 0:
        octets = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
        print(f"steps {first} to {args.steps}; parameters {hashlib.sha256(octets).hexdigest()[:16]}")
        print(checked)
    dist.destroy_process_group()


def latest(folder: Path | None, size: int) -> int:
    """The latest step that every rank has saved; 0 if there is none."""
    names = {path.name for path in folder.glob("*.pt")} if folder else set()
    steps = (int(name.split("-")[0]) for name in names)
    return max((s for s in steps if all(f"{s}-{rank}.pt" in names for rank in range(size))), default=0)


def save(state: object, path: Path) -> None:
    """A file is there as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    main()
