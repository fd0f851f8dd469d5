"""Records the loss of every training step inside the processes of a script that knows nothing about it.

The loss is the scalar on which `backward()` is called, without the factor of a GradScaler. A step ends with the
backward pass in which the hook averages gradients, as everywhere in gradwire. If several backward passes belong to a
step (`no_sync`, or two losses), their sum is recorded, because the gradient of the step is that of the sum. Of several
models the first one to train counts the steps. A script without DDP and `fully_shard`, which has no hook, ends a step
with the step of its optimizer.

Each rank appends to a file of its own in the folder of the plan, as `RankCurve` reads it:

    {"rank": 0, "size": 2}               once
    [1, 5.5312, 0.0]                     a step: its number, its loss, and seconds since the end of the first step
    {"metric": 5.2, "step": 50}          a value of `--metric` that the script has logged
    {"sent_bytes": 123.0}                once, after the last step: per step, as the hook has counted
    {"problem": "..."}                   why there is no loss
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing.util
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradwire.engine.hook import Hook
from gradwire.engine.log import listeners
from gradwire.models.register import register
from gradwire.tools.launch.link import emulate
from gradwire.tools.launch.plan import RunPlan
from gradwire.tools.records.records import PLAIN

FLUSH_S = 0.5
"""A rank writes what it has recorded after this time, and after the last step."""
FILE = "curve-"
"""The names of the files begin with this."""
NOT_SCALAR = (
    "backward() was called on a tensor of shape {shape}, and compare needs a scalar loss; call it on a mean or a sum"
)

_recorders: dict[str, Recorder] = {}
"""The recorder of this process, by the folder of its plan."""


class Recorder:
    """Collects the losses of one process."""

    def __init__(self, plan: RunPlan) -> None:
        self._steps, self._metric, self._path = plan.job["steps"], plan.job["metric"], Path(plan.folder)
        self._counters: list[Callable[[], int]] = []
        """By model, how many steps it has averaged."""
        self._lead: int | None = None
        self._counted = 0
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._losses: list[Tensor] = []
        """Of the backward passes of the step so far."""
        self._rows: list[tuple[list[Tensor], float]] = []
        """Steps that are not written yet."""
        self._done = 0
        self._lines: list[dict[str, Any]] = []
        self._file: Path | None = None
        self._wrote_s = time.perf_counter()
        self._first_s: float | None = None
        self._hook: weakref.ref[Hook] | None = None
        self._inside = False

    # -- what the patched functions call ---------------------------------------------------------------------------

    @contextmanager
    def backward(self, tensors: Any, grads: Any) -> Iterator[None]:
        """Around every backward pass. One within another, as of activation checkpoints, is part of it."""
        if self._inside:
            yield
            return
        self._inside = True
        self._note(tensors, grads)
        try:
            yield
        finally:
            self._inside = False
        if self._step_has_ended():
            self._end_step()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """After every step of every optimizer. It ends the step if there is no hooked model."""
        if self._counters or not self._losses:
            return
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._end_step()

    def log(self, name: str, value: float) -> None:
        """What the script logs."""
        if name == self._metric:
            self._lines.append({"metric": value, "step": self._done})
            self.write()

    def count(self, counter: Callable[[], int], hook: Hook | None = None) -> None:
        """Another model of the script: how to tell the number of its steps."""
        self._counters.append(counter)
        if hook is not None and self._hook is None:
            self._hook = weakref.ref(hook)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _note(self, tensors: Any, grads: Any) -> None:
        """Remember the losses of a backward pass."""
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        weights = [grads] * len(losses) if grads is None or isinstance(grads, Tensor) else list(grads)
        for loss, weight in zip(losses, weights, strict=False):
            loss = getattr(loss, "gradwire_unscaled", loss)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                self._lines.append({"problem": NOT_SCALAR.format(shape=tuple(getattr(loss, "shape", ())))})
                self.write()
                continue
            value = loss.detach().clone()
            self._losses.append(value if weight is None or weight.numel() != 1 else value * weight.detach())

    def _step_has_ended(self) -> bool:
        counts = [counter() for counter in self._counters]
        if self._lead is None:
            self._lead = next((at for at, count in enumerate(counts) if count), None)
        if self._lead is None or counts[self._lead] == self._counted:
            return False
        self._counted = counts[self._lead]
        return True

    def _end_step(self) -> None:
        if self._done == self._steps:
            self._losses.clear()
            return
        now_s = time.perf_counter()
        self._first_s = now_s if self._first_s is None else self._first_s
        self._rows.append((self._losses, now_s - self._first_s))
        self._losses = []
        self._done += 1
        if self._done == self._steps or now_s - self._wrote_s > FLUSH_S or self._done <= 1:
            self.write()

    def write(self) -> None:
        """Append what is not written yet. Reading the values waits for an accelerator, so it is done now and then."""
        lines = [] if self._file is not None else [json.dumps(_who())]
        for at, (losses, seconds) in enumerate(self._rows, start=self._done - len(self._rows) + 1):
            lines.append(json.dumps([at, sum(map(float, losses)), round(seconds, 6)]))
        lines += map(json.dumps, self._lines)
        hook = None if self._hook is None else self._hook()
        if hook is not None and self._rows and self._done == self._steps:
            lines.append(json.dumps({"sent_bytes": hook.stats().sent_bytes}))
        self._file = self._file or self._path / f"{FILE}{os.getpid()}.jsonl"
        if self._path.exists():  # the run may be over
            with self._file.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))
        self._rows, self._lines, self._wrote_s = [], [], time.perf_counter()

    def finish(self) -> None:
        """At the end of the process."""
        hook = None if self._hook is None else self._hook()
        if hook is not None and self._done != self._steps and self._done:
            self._lines.append({"sent_bytes": hook.stats().sent_bytes})
        if self._done or self._lines:
            self.write()


def _who() -> dict[str, int]:
    if dist.is_available() and dist.is_initialized():
        return {"rank": dist.get_rank(), "size": dist.get_world_size()}
    return {"rank": int(os.environ.get("RANK", "0")), "size": int(os.environ.get("WORLD_SIZE", "1"))}


# -- in the process ----------------------------------------------------------------------------------------------------


def start(plan: RunPlan) -> None:
    """Record the losses of this process from now on. A second call does nothing."""
    if plan.folder in _recorders:
        return
    recorder = _recorders[plan.folder] = Recorder(plan)
    _patch_backward(recorder)
    _patch_scaler()
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: recorder.optimizer_stepped(optimizer))
    listeners.append(recorder.log)
    multiprocessing.util.Finalize(None, recorder.finish, exitpriority=0)  # as `launch.run` does


def _patch_backward(recorder: Recorder) -> None:
    """`Tensor.backward` calls this function too."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        with recorder.backward(tensors, grad_tensors):
            original(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward


def _patch_scaler() -> None:
    """A scaled loss remembers the loss."""
    original = torch.amp.GradScaler.scale

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if isinstance(outputs, Tensor) and scaled is not outputs:
            scaled.gradwire_unscaled = outputs.detach()
        return scaled

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def hooked(model: nn.Module, plan: RunPlan) -> None:
    """Register the hook of this run with a model of the script, and count the steps of the model."""
    recorder, link, spec = _recorders[plan.folder], plan.job["link"], plan.job["hook"]
    if spec != PLAIN:
        with emulate(link) if link else nullcontext():
            hook = register(model, spec, gather=plan.job["gather"])
        recorder.count(lambda: hook.steps, hook)
    elif isinstance(model, DistributedDataParallel):
        recorder.count(_steps_of(model))


def _steps_of(model: DistributedDataParallel) -> Callable[[], int]:
    """Counts the backward passes in which a DDP model without our hook averages gradients."""
    reached, count = [False], [0]

    def note(param: Tensor) -> None:
        reached[0] = True

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(note)

    def steps() -> int:
        count[0] += reached[0] and model.require_backward_grad_sync
        reached[0] = False
        return count[0]

    return steps


# -- in the process that reads -----------------------------------------------------------------------------------------


class RankCurve:
    """Follows the file of one rank while it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.rank, self.size = 0, 0
        self.losses: list[float] = []
        self.times_s: list[float] = []
        self.metric: list[tuple[int, float]] = []
        self.sent_bytes: float | None = None
        self.problem = ""

    def update(self) -> None:
        """Read what is new. A line that is being written is left for the next time."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._add(json.loads(line))

    def _add(self, entry: Any) -> None:
        if isinstance(entry, list):
            self.losses.append(entry[1])
            self.times_s.append(entry[2])
        elif "metric" in entry:
            self.metric.append((entry["step"], entry["metric"]))
        else:
            for name, value in entry.items():
                setattr(self, name, value)


class RunCurves:
    """Follows the files of all ranks of a run."""

    def __init__(self, folder: str) -> None:
        self._folder, self._ranks = Path(folder), dict[Path, RankCurve]()

    def update(self) -> None:
        """Read what is new."""
        for path in self._folder.glob(f"{FILE}*.jsonl"):
            self._ranks.setdefault(path, RankCurve(path)).update()

    @property
    def ranks(self) -> list[RankCurve]:
        """By rank, the process with the most steps."""
        best: dict[int, RankCurve] = {}
        for curve in self._ranks.values():
            if curve.rank not in best or len(curve.losses) > len(best[curve.rank].losses):
                best[curve.rank] = curve
        return [best[rank] for rank in sorted(best)]

    @property
    def steps(self) -> int:
        """The steps that all ranks have recorded."""
        ranks = self.ranks
        complete = ranks and len(ranks) == ranks[0].size
        return min(len(curve.losses) for curve in ranks) if complete else 0

    def mean_losses(self) -> list[float]:
        """Of every step, the mean over the ranks."""
        return [sum(values) / len(values) for values in _rows([curve.losses for curve in self.ranks], self.steps)]

    def step_s(self) -> list[float]:
        """Of every step but the first, the time on the slowest rank."""
        times = [curve.times_s for curve in self.ranks]
        spans = [[after - before for before, after in itertools.pairwise(each)] for each in times]
        return [max(values) for values in _rows(spans, max(self.steps - 1, 0))]

    def metric(self) -> list[tuple[int, float]]:
        """By step, the mean over the ranks that have logged it."""
        logged: dict[int, list[float]] = {}
        for curve in self.ranks:
            for step, value in curve.metric:
                logged.setdefault(step, []).append(value)
        return [(step, sum(values) / len(values)) for step, values in sorted(logged.items())]

    def problem(self) -> str:
        """Why there are no losses, if a rank knows."""
        return next((curve.problem for curve in self.ranks if curve.problem), "")


def _rows(columns: Sequence[Sequence[float]], count: int) -> list[tuple[float, ...]]:
    return [tuple(column[at] for column in columns) for at in range(count)]
