"""selfcheck(): does everything give the right bits on this machine, with these ranks, on this device?

1. The ranks compare their versions, devices and kernels; if they differ, nothing is run.
2. The kernels of every codec are compared with the torch kernels on the CPU, and timed beside a copy.
3. Every exchange averages inputs of all kinds, and is compared with its reference and with the exact mean.
4. Every hook trains a small GPT for a few steps, and `Hook.verify()` checks it; steps are timed.

The ranks form a gloo world, in which they talk about results. What is checked uses a group of the device's own backend.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire import kernels
from gradwire.engine.agreement import texts_of
from gradwire.engine.events import Moment, each_seconds, now
from gradwire.engine.fingerprint import fingerprint
from gradwire.engine.hook import Hook
from gradwire.errors import GradwireError, RegisterError, SpecError, VerifyError
from gradwire.exchanges import EXCHANGES, Coded, Exchange, exchange
from gradwire.exchanges.bucket import Bucket
from gradwire.models.ddp import make_hook
from gradwire.models.register import register
from gradwire.testing import device as test_device
from gradwire.testing.contracts.exchanges import all_inputs, observe_hook, references, unobserved
from gradwire.tools.launch.launch import Report, run_ranks
from gradwire.tools.measure.kernel_bits import kernel_differences, kernel_speed
from gradwire.tools.measure.probe import is_launched
from gradwire.tools.records.records import PLAIN
from gradwire.tools.workload import Workload, WorkloadSettings
from gradwire.version import __version__

UNTIMED = 2
"""Training steps in which DDP rebuilds its buckets and memory is first touched."""
CHUNK_BYTES = 16_384
"""On the CPU, where the engine cuts buckets, the small ones of the checks are cut too."""
TIMEOUT_S = 300.0
"""A kernel may have to be compiled while other ranks wait."""
MOST_TEXTS = 5
RAISED = "the kernels raise "
SMALL = WorkloadSettings(layers=1, width=32, heads=2, context=16, batch=1, optimizer="sgd", text_bytes=500_000)
MIDDLE = WorkloadSettings(layers=2, width=128, context=32, optimizer="sgd", text_bytes=500_000)
LARGE = WorkloadSettings(layers=8, width=1024, heads=16, context=128, batch=8, optimizer="sgd", text_bytes=2_000_000)
"""100M parameters, or 400 MB of gradients: a step that a GPU does not spend with launches alone."""
WORKLOADS = {"cpu": (MIDDLE, 5), test_device.DEVICE: (SMALL, 1)}
"""By device: the model, and the number of timed steps. Time on the test device is simulated, and always the same."""


class SelfcheckFailed(GradwireError):
    """Something does not give the right bits on this machine."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank says about itself."""

    host: str
    device: str
    """The type of its device."""
    name: str
    """The model of its device."""
    versions: str
    kernels: str
    hooks: tuple[str, ...]
    problem: str = ""
    """Why it cannot take part."""


@dataclass(slots=True)
class Row:
    """What was found about one hook. A list of texts says what is wrong; None means that it does not apply."""

    hook: str
    kernels: list[str] | None = None
    mean: list[str] | None = None
    training: list[str] | None = None
    error: float | None = None
    """Error of a mean of normal values, relative to the exact mean."""
    encode_copies: float | None = None
    decode_copies: float | None = None
    step_s: float | None = None
    """The median of the timed steps, of the slowest rank."""
    encode_s: float | None = None
    wire_s: float | None = None
    decode_s: float | None = None
    wait_s: float | None = None
    sent_bytes: float | None = None

    def failures(self) -> list[str]:
        """One line for each thing that is wrong."""
        parts = {"kernels": self.kernels, "mean": self.mean, "training": self.training}
        return [f"{self.hook}, {part}: {text}" for part, texts in parts.items() for text in texts or ()]


def selfcheck(
    *, device: str | None = None, nproc: int = 2, hooks: Sequence[str] = (), report: Report = lambda part, doing: None
) -> tuple[dict[str, Any] | None, bool]:
    """Check this machine on local processes, or on the ranks that torchrun has started, of which this is one.

    Args:
        device: The type of the device, such as `cuda`; by default the accelerator, or the CPU if there is none.
        nproc: The number of local processes.
        hooks: The specs to check; by default all.
        report: Called with the part that is done and what is being done.

    Returns:
        The results as plain values, and whether everything is right. If a launcher has started this process, all
        ranks but the first get None for the results.

    Raises:
        SpecError: The device or a hook does not exist. Nothing has been started.
        RegisterError: The ranks differ in what they run on.
        RunFailed: A rank failed.
    """
    device = device or _accelerator()
    job = {"device": device, "hooks": [str(exchange(hook)) for hook in hooks]}
    if not is_launched():
        if problem := device_problem(device, nproc):
            raise SpecError(problem)
        result: dict[str, Any] = run_ranks(
            "gradwire.tools.measure.selfcheck:run", nproc, job, report=report, timeout_s=TIMEOUT_S
        )[0]
        return result, bool(result["passed"])
    dist.init_process_group("gloo")
    try:
        result = run(dist.get_rank(), dist.get_world_size(), job, report)
        dist.barrier()
        return (result if dist.get_rank() == 0 else None), bool(result["passed"])
    finally:
        dist.destroy_process_group()


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Check on one rank of a gloo world. All ranks return the same results."""
    began = time.monotonic()
    hooks = job["hooks"] or all_hooks(size)
    facts = _agreed(_facts(job["device"], hooks, size))
    device = _device(job["device"])
    group = dist.group.WORLD
    if device.type != "cpu":
        group = dist.new_group(backend=dist.get_default_backend_for_device(device))
    check = Check(group, device)  # type: ignore[arg-type]
    rows = [Row(PLAIN), *(Row(hook) for hook in hooks)]
    for index, row in enumerate(rows):
        report(index / len(rows), f"checking {row.hook}")
        check.fill(row)
    failures = [text for row in rows for text in row.failures()]
    return {
        "ranks": size,
        "backend": dist.get_backend(group),
        "facts": [asdict(each) for each in facts],
        "rows": [asdict(row) for row in rows],
        "failures": failures,
        "passed": not failures,
        "took_s": time.monotonic() - began,
    }


def all_hooks(size: int) -> list[str]:
    """Every registered hook, and one of two levels if the ranks can be split."""
    return [*EXCHANGES, *([f"two_level:node={size // 2}"] if size % 2 == 0 else [])]


# -- ranks -----------------------------------------------------------------------------------------------------------


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def device_problem(name: str, local_ranks: int) -> str:
    """Why so many ranks of this machine cannot use a device of this type; empty if they can."""
    if name in ("cpu", test_device.DEVICE):
        return ""
    try:
        module = torch.get_device_module(name)
    except RuntimeError:
        return f"--device {name!r} is not a device of torch; use cpu or cuda"
    if not getattr(module, "is_available", bool)():
        return (
            f"--device {name}: torch {torch.__version__} finds no such device on {socket.gethostname()}; install a "
            "build of torch for it, or use --device cpu"
        )
    if local_ranks > (count := module.device_count()):
        return f"{local_ranks} ranks need as many devices, and {socket.gethostname()} has {count}; use --nproc {count}"
    return ""


def _facts(name: str, hooks: Sequence[str], size: int) -> Facts:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    versions = f"gradwire {__version__}, torch {torch.__version__}"
    problem = device_problem(name, local_ranks)
    if problem:
        return Facts(socket.gethostname(), name, "", versions, "", tuple(hooks), problem)
    device = _device(name)
    kernels.load()
    return Facts(socket.gethostname(), name, _model_of(device), versions, kernels.in_use(device), tuple(hooks))


def _device(name: str) -> torch.device:
    """This rank's device, which becomes the current one."""
    if name == "cpu":
        return torch.device("cpu")
    if name == test_device.DEVICE:
        test_device.load()
        return torch.device(name, 0)
    device = torch.device(name, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    torch.get_device_module(device).set_device(device)
    return device


def _model_of(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))


def _agreed(own: Facts) -> list[Facts]:
    """The facts of all ranks. RegisterError on all of them if one cannot take part, or if they differ."""
    told = [json.loads(text) for text in texts_of(_world(), json.dumps(asdict(own)))]
    everyone = [Facts(**{**facts, "hooks": tuple(facts["hooks"])}) for facts in told]
    problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(everyone) if each.problem]
    if problems:
        raise RegisterError("; ".join(problems))
    for field, what in (("device", "device"), ("versions", "versions"), ("kernels", "kernels"), ("hooks", "hooks")):
        values = [getattr(each, field) for each in everyone]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
            raise RegisterError(f"all ranks must have the same {what}, but {listed}")
    return everyone


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _together(texts: Sequence[str]) -> list[str]:
    """The texts of all ranks, each with the ranks that have it; of many, the first ones."""
    everyone: list[list[str]] = [json.loads(text) for text in texts_of(_world(), json.dumps(list(texts)))]
    ranks: dict[str, list[str]] = {}
    for rank, own in enumerate(everyone):
        for text in own:
            ranks.setdefault(text, []).append(str(rank))
    listed = [f"{text} (rank {', '.join(found)})" for text, found in ranks.items()]
    return [*listed[:MOST_TEXTS], *([f"and {len(listed) - MOST_TEXTS} more"] if len(listed) > MOST_TEXTS else [])]


# -- checks ----------------------------------------------------------------------------------------------------------


class Check:
    """The checks of one hook, on all ranks together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        settings, self._timed = WORKLOADS.get(device.type, (LARGE, 10))
        self._workload = Workload(settings, seed=0, rank=group.rank(), size=group.size())

    def fill(self, row: Row) -> None:
        """Check one hook."""
        if row.hook != PLAIN:
            checked = exchange(row.hook)
            if isinstance(checked, Coded) and not self._check_kernels(row, checked):
                return
            self._check_mean(row, checked)
        self._train(row)

    def _check_kernels(self, row: Row, checked: Coded) -> bool:
        """Whether the kernels run at all: if they raise an error on any rank, the hook is not tried."""
        try:
            texts = kernel_differences(checked.codec, self._device)
        except Exception as error:
            texts = [f"{RAISED}{type(error).__name__}: {error}"]
        row.kernels = _together(texts)
        if not row.kernels:
            speed = kernel_speed(checked.codec, self._device)
            row.encode_copies, row.decode_copies = speed.encode_copies, speed.decode_copies
        return not any(text.startswith(RAISED) for text in row.kernels)

    def _check_mean(self, row: Row, checked: Exchange) -> None:
        """Every rank computes the inputs of all ranks, and their references, on the CPU."""
        hook = make_hook(checked, self._group, self._device, CHUNK_BYTES if self._device.type == "cpu" else None)
        mine = observe_hook(hook, lambda rank, step: [_on(self._device, each) for each in all_inputs(rank, step)])
        results = [own.result.cpu() for own in mine]
        prints = hook.gather(torch.stack([fingerprint(result) for result in results]).to(self._device)).cpu()
        texts = [] if bool((prints == prints[0]).all()) or not checked.averages else ["the ranks' bits differ"]
        everyone = [unobserved(hook, rank, all_inputs) for rank in range(hook.size)]
        hook.close()
        with kernels.reference():
            wanted = references(checked, everyone)
        for number, (reference, own, result) in enumerate(zip(wanted, mine, results, strict=True)):
            residual = None if own.residual is None else own.residual.cpu()
            text = reference and (reference.difference(result) or reference.residual_difference(hook.rank, residual))
            texts += [f"bucket {number}: {text}"] if text else []
        if checked.averages:
            inputs = torch.stack([torch.cat([chunk.flat for chunk in rank[0].chunks]) for rank in everyone]).double()
            row.error, text = _error(checked, inputs, results[0])
            texts += [text] if text else []
        row.mean = _together(texts)

    def _train(self, row: Row) -> None:
        """Train a few steps under the hook, and let it verify itself."""
        model = DistributedDataParallel(self._workload.model().to(self._device), process_group=self._group)
        hook = None if row.hook == PLAIN else register(model, row.hook)
        marks, losses = self._steps(model, hook)
        row.step_s = _largest(statistics.median(each_seconds(list(pairwise(marks))[UNTIMED:])))
        texts = [] if bool(torch.stack(losses).isfinite().all()) else ["the loss is not finite"]
        if hook is not None:
            stats = hook.stats()
            for name in ("encode_s", "wire_s", "decode_s", "wait_s", "sent_bytes"):
                setattr(row, name, getattr(stats, name))
            try:
                hook.verify()
            except VerifyError as error:
                texts.append(str(error))
            hook.close()
        row.training = _together(texts)

    def _steps(self, model: DistributedDataParallel, hook: Hook | None) -> tuple[list[Moment], list[Tensor]]:
        """Train, and return the moments between the steps, and the losses."""
        optimizer, marks, losses = self._workload.optimizer(model), [now(self._device)], []
        for step in range(UNTIMED + self._timed):
            if step == UNTIMED and hook is not None:
                hook.reset_stats()
            optimizer.zero_grad()
            loss = self._workload.loss(model, self._workload.batch(step).to(self._device))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            marks.append(now(self._device))
        return marks, losses


def _on(device: torch.device, bucket: Bucket) -> Bucket:
    segments = tuple(dataclasses.replace(part, param=part.param.to(device)) for part in bucket.segments)
    return dataclasses.replace(bucket, flat=bucket.flat.to(device), segments=segments)


def _error(checked: Exchange, inputs: Tensor, result: Tensor) -> tuple[float, str]:
    """The error of a mean, relative to the exact mean; and whether it is above what the exchange promises."""
    exact, rms = inputs.mean(0), float(inputs.square().sum(1).mean().sqrt())
    lost, bound = float((result.double() - exact).norm()), checked.bound(len(inputs))
    above = bound is not None and lost > (bound + len(inputs) * torch.finfo(result.dtype).eps) * rms
    return lost / float(exact.norm()), f"the error {lost / rms:.3g} is above the promised {bound:.3g}" if above else ""


def _largest(value: float) -> float:
    """The largest of the ranks' values."""
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)
