"""run(): an unmodified DDP script under a hook. `gradwire.run` is the same under torchrun.

The hook is registered when the script builds its DistributedDataParallel, in whatever process it does so.
"""

from __future__ import annotations

import multiprocessing.util
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradwire.auto.settings import auto
from gradwire.exchanges import exchange
from gradwire.models.ddp import register
from gradwire.tools.launch import Plan, Script, ScriptFailed, follow
from gradwire.tools.launch.link import Link, emulate
from gradwire.tools.launch.plan import new_plan

NO_MODEL = (
    "the script ended, but it never built a torch.nn.parallel.DistributedDataParallel, so no hook was used. Ranks that "
    "train through FSDP, DeepSpeed or DataParallel have no place for one"
)

_to_write: list[Callable[[], None]] = []
"""Brings the notes of this process up to date."""


def run(
    script: Script,
    spec: str,
    *,
    link: str | None = None,
    nproc: int | None = None,
    torchrun: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run a script under the hook `spec`; what the hook of each model has done, on the first rank.

    `nproc` and `torchrun` say how ranks are started, see `launch.launch`. SpecError comes before anything starts;
    ScriptFailed if the script fails, and if it built no DDP model.
    """
    job = {"spec": str(auto(spec) or exchange(spec)), "link": None if link is None else str(Link.parse(link))}
    with new_plan("run", "gradwire.tools.launch.run:hooked", job) as plan:
        follow(plan, script, nproc, torchrun)
        for write in _to_write:
            write()
        done = plan.notes("model")
        if not done:
            raise ScriptFailed(NO_MODEL)
        return [note for note in done if note["rank"] == 0]


def hooked(model: DistributedDataParallel, plan: Plan) -> None:
    """Give a model of the script its hook, and leave a note now and at the end of the process."""
    link = plan.job["link"]
    with emulate(link) if link else nullcontext():
        hook = register(model, plan.job["spec"])
    note, alive = plan.new_note("model"), weakref.ref(hook)

    def write() -> None:
        now = alive()  # models and hooks may go before the process does: then the last note stays
        if now is not None:
            counted = {"rank": now.rank, "ranks": now.size, "total_steps": now.steps}
            plan.write(note, {**counted, **now.stats().as_dict()})

    write()
    weakref.finalize(model, write)
    _to_write.append(write)
    multiprocessing.util.Finalize(None, write, exitpriority=0)  # atexit would not do in children of multiprocessing
