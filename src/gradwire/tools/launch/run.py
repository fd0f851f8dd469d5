"""run(): an unmodified DDP or FSDP2 script under a hook. `gradwire run` is its command line.

The hook is registered when the script builds its DistributedDataParallel, or when the first forward pass of a model
with `fully_shard` begins, in whatever process that happens.
"""

import multiprocessing.util
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from gradwire.auto.settings import auto
from gradwire.exchanges import exchange
from gradwire.metrics import JSONL, Recorder, Sink, Terminal
from gradwire.models.register import register
from gradwire.tools.launch.launch import follow, is_rank
from gradwire.tools.launch.link import Link, emulate
from gradwire.tools.launch.plan import RunPlan, new_plan
from gradwire.tools.launch.script import Script
from gradwire.tools.launch.supervise import RunFailed

NO_MODEL = (
    "the script ended, but it never built a torch.nn.parallel.DistributedDataParallel, and trained no model with "
    "fully_shard, so no hook was used. Models that train with FSDP1, DeepSpeed or DataParallel cannot have one"
)

RECORD_S = 1.0
"""The least time between two records, which take a fraction of a millisecond and up to 1 ms per million parameters."""
_to_write: list[Callable[[], None]] = []
"""Each brings one note of this process up to date."""


def run(
    script: Script,
    spec: str,
    *,
    gather: str | None = None,
    link: str | None = None,
    metrics: Path | None = None,
    watch: bool = False,
    nproc: int | None = None,
    torchrun: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run a script under a hook.

    Args:
        script: What to run.
        spec: The hook to register with every model.
        gather: For models with `fully_shard`: how their parameters are gathered.
        link: A link to emulate, such as `1gbit,latency=1ms`.
        metrics: A file for what the hook does while the script runs: see `gradwire.metrics.JSONL`. The second model
            of a script has a file of its own.
        watch: Print the same to stderr, as lines.
        nproc: The number of ranks to start; see `launch.launch`.
        torchrun: Options of torchrun; see `launch.launch`.

    Returns:
        For each model what its hook has done, as counted on rank 0.

    Raises:
        SpecError: The spec or the link is wrong, or the file cannot be written. Nothing has been started.
        RunFailed: The script failed, or it built no model that can have a hook.
    """
    job = {
        "spec": str(auto(spec) or exchange(spec)),
        "gather": None if gather is None else str(exchange(gather)),
        "link": None if link is None else str(Link.parse(link)),
        "metrics": None if metrics is None else str(metrics.absolute()),
        "watch": watch,
    }
    if metrics is not None and not is_rank(nproc, torchrun):
        JSONL(metrics).open()
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
    if sinks := _sinks(plan.job, model=1 + len(_to_write)):
        Recorder(hook, sinks, every=1, least_s=RECORD_S)
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


def _sinks(job: Mapping[str, Any], model: int) -> list[Sink]:
    """Where to write what the hook of a model does; `model` counts the models of this process."""
    sinks: list[Sink] = []
    if job["metrics"]:
        path = Path(job["metrics"])
        sinks.append(JSONL(path if model == 1 else path.with_stem(f"{path.stem}-{model}")))
    if job["watch"]:
        sinks.append(Terminal("gradwire run" if model == 1 else f"gradwire run, model {model}"))
    return sinks
