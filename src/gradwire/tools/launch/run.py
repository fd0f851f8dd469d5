"""run(): an unmodified DDP or FSDP2 script under a hook. `gradwire run` is its command line.

The hook is registered when the script builds its DistributedDataParallel, or when the first forward pass of a model
with `fully_shard` begins, in whatever process that happens.
"""

import multiprocessing.util
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from gradwire.auto.settings import auto
from gradwire.exchanges import exchange
from gradwire.models.register import register
from gradwire.tools.launch.launch import follow
from gradwire.tools.launch.link import Link, emulate
from gradwire.tools.launch.plan import RunPlan, new_plan
from gradwire.tools.launch.script import Script
from gradwire.tools.launch.supervise import RunFailed

NO_MODEL = (
    "the script ended, but it never built a torch.nn.parallel.DistributedDataParallel, and trained no model with "
    "fully_shard, so no hook was used. Models that train with FSDP1, DeepSpeed or DataParallel cannot have one"
)

_to_write: list[Callable[[], None]] = []
"""Each brings one note of this process up to date."""


def run(
    script: Script,
    spec: str,
    *,
    gather: str | None = None,
    link: str | None = None,
    nproc: int | None = None,
    torchrun: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run a script under a hook.

    Args:
        script: What to run.
        spec: The hook to register with every model.
        gather: For models with `fully_shard`: how their parameters are gathered.
        link: A link to emulate, such as `1gbit,latency=1ms`.
        nproc: The number of ranks to start; see `launch.launch`.
        torchrun: Options of torchrun; see `launch.launch`.

    Returns:
        For each model what its hook has done, as counted on rank 0.

    Raises:
        SpecError: The spec or the link is wrong. Nothing has been started.
        RunFailed: The script failed, or it built no model that can have a hook.
    """
    job = {
        "spec": str(auto(spec) or exchange(spec)),
        "gather": None if gather is None else str(exchange(gather)),
        "link": None if link is None else str(Link.parse(link)),
    }
    with new_plan("run", "gradwire.tools.launch.run:hooked", job) as plan:
        follow(plan, script, nproc, torchrun)
        for write in _to_write:
            write()
        done = plan.read("model")
        if not done:
            raise RunFailed(NO_MODEL)
        return [note for note in done if note["rank"] == 0]


def hooked(model: nn.Module, plan: RunPlan) -> None:
    """Register the hook with a model of the script, and write a note now and at the end of the process."""
    link = plan.job["link"]
    with emulate(link) if link else nullcontext():
        hook = register(model, plan.job["spec"], gather=plan.job["gather"])
    note, alive = plan.new_note("model"), weakref.ref(hook)

    def write() -> None:
        now = alive()  # models and hooks may be gone before the process ends: then the last note stays
        if now is not None:
            counted = {"rank": now.rank, "ranks": now.size, "total_steps": now.steps}
            plan.write(note, {**counted, **now.stats().as_dict()})

    write()
    weakref.finalize(model, write)
    _to_write.append(write)
    multiprocessing.util.Finalize(None, write, exitpriority=0)  # children of multiprocessing do not run atexit
