"""The ranks that `gradwire probe` measures: local processes, or those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import SpecError
from gradwire.exchanges import exchange
from gradwire.models.ddp import make_hook
from gradwire.tools.launch.link import Link, emulate
from gradwire.tools.launch.local import run_ranks
from gradwire.tools.measure.probe import Probe, Report, probe


def probe_local(nproc: int, *, link: str | None = None, pairs: bool | None = None, report: Report) -> dict[str, Any]:
    """`Probe.as_dict()` of rank 0 of `nproc` local processes, on an emulated link if there is one."""
    if nproc == 1:
        raise SpecError("nproc must be at least 2, as one rank has nothing to exchange; got 1")
    job = {"link": None if link is None else str(Link.parse(link)), "pairs": pairs}
    found: dict[str, Any] = run_ranks("gradwire.tools.measure.probe_ranks:run", nproc, job, report=report)[0]
    return found


def probe_launched(*, link: str | None, pairs: bool | None, report: Report) -> dict[str, Any] | None:
    """The same between the ranks of which this is one, by torchrun's environment variables; None on all but rank 0."""
    dist.init_process_group("gloo")
    try:
        found = run(dist.get_rank(), dist.get_world_size(), {"link": link, "pairs": pairs}, report)
        dist.barrier()
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def is_launched() -> bool:
    """Whether something like torchrun has started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """One rank, within a process group."""
    with emulate(job["link"]) if job["link"] else nullcontext():
        hook = make_hook(exchange("exact"), dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    found: Probe = probe(hook, pairs=job["pairs"], report=report)
    hook.close()
    return found.as_dict()
