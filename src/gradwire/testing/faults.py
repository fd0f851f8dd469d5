"""Faults: end, stop or break one rank of a training at a chosen moment, and see what the other ranks do.

`strike` trains a small model on ranks of its own (forked, so that a trial takes a second), lets the fault happen, and
returns what every rank reported. It judges nothing but time: `Outcome.problems` says what a good outcome is.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch import TCPStore
from gradwire.engine.hook import Hook
from gradwire.models.register import register
from gradwire.optim.local_sgd import DiLoCo, LocalSGD
from gradwire.testing.links import Links
from gradwire.testing.processes import PRELOAD

LOCAL_HOST = "127.0.0.1"
STEPS = 7
SWITCH_AT, VERIFY_AT, SAVE_AT = 2, 3, 4
TIMEOUT_S = 4.0
"""The time limit of the process group."""
GRACE_S = 5.0
"""How much later than it must a rank may raise: after the time limit, or after a connection was closed."""
START_S = 60.0
"""How long ranks may take to come to the fault."""
TORCHS = ("RuntimeError: [", "RuntimeError: Gloo connectFullMesh failed")
"""How an error begins that a collective of DDP or FSDP2 itself has raised, such as the one that orders the buckets, or
init_process_group on a rank that is still in it when another one has left it and fails."""
START_EXTRA_S = 15.0
"""init_process_group looks at its time limit every 10 seconds only."""
MISTAKE = "the mistake of this trial"
WIDTH = 32

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
KINDS = (*SIGNALS, "exit", "raise", "raise in exchange", "raise in optimizer", "full disk")
LINK_KINDS = ("partition", "short partition", "slow link")
"""What happens to the link of a rank, for `strike(fault, links)`. Only the first is longer than the time limit."""
SHORT_S = 1.0
SLOW = "500kbit"
MOMENTS = ("start", "register", "forward", "backward", "optimizer", "switch", "verify", "save", "close", "exit")
LOCAL = {"local_sgd": LocalSGD, "diloco": DiLoCo}


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and when."""

    kind: str
    """One of KINDS or LINK_KINDS."""
    moment: str
    """One of MOMENTS."""
    step: int
    """The step of the moments that every step has."""
    delay_s: float
    """How long after the beginning of the moment a signal comes."""
    rank: int
    size: int
    subject: str
    """`ddp <spec>`, `fsdp <spec>`, `local_sgd <spec>` or `diloco <spec>`."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.kind} of rank {self.rank} of {self.size} at {self.moment}, step {self.step}"


@dataclass(frozen=True)
class Report:
    """What one rank says at its end."""

    rank: int
    text: str
    """The error that ended its training; empty if it trained to the end."""
    at_s: float
    """When (`time.monotonic`, which all processes share)."""
    threads: tuple[str, ...] = ()
    """Threads of gradwire that are left after the hook was closed."""


@dataclass
class Outcome:
    """What came of a fault."""

    fault: Fault
    fault_s: float | None = None
    """When it happened; None if training did not come to it."""
    reports: dict[int, Report] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    """Ranks that had to be ended."""

    @property
    def seconds(self) -> list[float]:
        """How long after the fault each other rank raised."""
        if self.fault_s is None:
            return []
        raised = [r for r in self.reports.values() if r.text]
        return [r.at_s - self.fault_s for r in raised if r.rank != self.fault.rank or self.fault.kind in LINK_KINDS]

    @property
    def limit_s(self) -> float:
        """The latest time at which the others may raise: at once if the connections close."""
        closes = self.fault.kind not in ("stop", "partition") and self.fault.moment not in ("start", "register")
        early = START_EXTRA_S if self.fault.moment == "start" else 0.0
        return GRACE_S + early + (0.0 if closes else TIMEOUT_S)

    def problems(self) -> list[str]:
        """What is wrong, a line each; empty if the outcome is as it should be."""
        found = [f"rank {rank} hung" for rank in self.hung]
        others = [r for r in self.reports.values() if r.rank != self.fault.rank]
        found += [f"rank {r.rank} left the thread {name}" for r in others for name in r.threads]
        found += [f"a rank needed {s:.1f} s, at most {self.limit_s:.1f}" for s in self.seconds if s > self.limit_s]
        if self.fault_s is None:
            own = self.reports.get(self.fault.rank)
            late = self.fault.kind in SIGNALS and own is not None and not own.text  # a signal came when all was over
            ends = "; ".join(f"rank {r.rank}: {r.text[:200] or 'ended'}" for r in self.reports.values())
            return found if late else [*found, f"training did not come to the fault ({ends})"]
        if self.fault.kind in LINK_KINDS[1:]:  # training goes on
            return found + [f"rank {r.rank} raised {r.text[:300]}" for r in self.reports.values() if r.text]
        found += [f"rank {r.rank}: {why}" for r in others if r.text and (why := self._why_bad(r.text))]
        return found

    def _why_bad(self, text: str) -> str:
        """A message must name the rank, or the mistake, once training has begun."""
        if self.fault.moment == "start" or text.startswith(TORCHS):
            return ""  # torch's own message, which knows no more
        wanted = f"rank {self.fault.rank}"
        return "" if wanted in text or MISTAKE in text else f"does not say {wanted!r}: {text[:300]}"


def strike(fault: Fault, links: Links | None = None) -> Outcome:
    """Train on `fault.size` ranks, let the fault happen, and collect what they report. No process is left.

    The kinds of LINK_KINDS need `links`.
    """
    outcome = Outcome(fault)
    context = get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    store = TCPStore(LOCAL_HOST, 0, is_master=True, wait_for_workers=False) if links is None else links.serve()
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(fault.size):
            mine, theirs = context.Pipe()
            args = (rank, fault, store.port, folder, theirs, links)
            process = context.Process(target=_main, args=args, daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            _collect(outcome, pipes, processes, links)
        finally:
            for process in processes:
                process.kill()
                process.join()
            if links is not None:
                links.mend(fault.rank)
    return outcome


def _damage(fault: Fault, links: Links) -> None:
    """What happens to the link. `strike` mends it in the end."""
    if fault.kind == "slow link":
        links.slow(fault.rank, SLOW)
        return
    links.cut(fault.rank)
    if fault.kind == "short partition":
        time.sleep(SHORT_S)
        links.mend(fault.rank)


def _collect(outcome: Outcome, pipes: list[Any], processes: list[Any], links: Links | None = None) -> None:
    """Read what the ranks send until each has reported or died, or it is too late."""
    open_ = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline, stopped = time.monotonic() + START_S, outcome.fault.kind == "stop"
    while open_ and time.monotonic() < deadline:
        ready: list[Any] = connection.wait(list(open_), timeout=0.1)
        for pipe in ready:
            try:
                got = pipe.recv()
            except (EOFError, OSError):  # the rank is dead
                del open_[pipe]
                continue
            if isinstance(got, float):
                outcome.fault_s = got
                early = START_EXTRA_S if outcome.fault.moment == "start" else 0.0
                if links is not None:
                    _damage(outcome.fault, links)
                deadline = time.monotonic() + TIMEOUT_S + 2 * GRACE_S + early
            else:
                outcome.reports[got.rank] = got
                del open_[pipe]
        if stopped and list(open_.values()) == [outcome.fault.rank]:  # all others have ended: now it comes back
            os.kill(processes[outcome.fault.rank].pid, signal.SIGCONT)
            stopped, deadline = False, time.monotonic() + TIMEOUT_S + 2 * GRACE_S
    outcome.hung = list(open_.values())


# -- one rank --------------------------------------------------------------------------------------------------------


class _Mistake(ValueError):
    """What user code raises here."""


class _Rank:
    """One rank of a trial."""

    def __init__(self, rank: int, fault: Fault, folder: str, pipe: Any) -> None:
        self.rank, self.fault, self.folder, self.pipe = rank, fault, folder, pipe
        self.hook: Hook | None = None

    def at(self, moment: str, step: int | None = None) -> None:
        """A moment begins. If it is this rank's, the fault happens."""
        fault = self.fault
        if (self.rank, moment) != (fault.rank, fault.moment) or step not in (None, fault.step):
            return
        if fault.kind in SIGNALS:
            threading.Timer(fault.delay_s, self._signal).start()
            return
        if fault.kind.startswith("raise in") or fault.kind == "full disk":
            return  # happens where the name says
        self.pipe.send(time.monotonic())
        if fault.kind in LINK_KINDS:
            return  # the parent reads this, and changes the link
        if fault.kind == "exit":
            os._exit(3)
        raise _Mistake(MISTAKE)

    def _signal(self) -> None:
        self.pipe.send(time.monotonic())
        os.kill(os.getpid(), SIGNALS[self.fault.kind])

    def is_due(self, kind: str, step: int) -> bool:
        """Whether a fault of this kind happens to this rank in this step. It is told to the parent."""
        due = (self.rank, kind, step) == (self.fault.rank, self.fault.kind, self.fault.step)
        if due:
            self.pipe.send(time.monotonic())
        return due

    def train(self, host: str, port: int) -> None:
        """The whole life of a training script."""
        torch.manual_seed(self.rank)
        self.at("start")
        limit = timedelta(seconds=TIMEOUT_S)
        store = TCPStore(host, port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.fault.size, timeout=limit)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        kind, spec = self.fault.subject.split(" ")
        if kind in LOCAL:
            self._train_locally(LOCAL[kind], model, spec)
        else:
            self._train_synchronously(kind, model, spec)
        self.at("exit")

    def _train_synchronously(self, kind: str, model: nn.Module, spec: str) -> None:
        wrapped: Any
        if kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            wrapped = fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model)
        self.at("register")
        self.hook = hook = register(wrapped, spec)
        optimizer = self._optimizer(wrapped)
        for step in range(STEPS):
            self._step(wrapped, optimizer, step)
            if step == SWITCH_AT:
                self.at("switch")
                hook.switch("bf16")
                hook.switch(spec)
            if step == VERIFY_AT:
                self.at("verify")
                hook.verify()
            if step == SAVE_AT:
                self._save(hook.state_dict)
        self.at("close")
        hook.close()

    def _train_locally(self, kind: type[LocalSGD], model: nn.Module, spec: str) -> None:
        optimizer = self._optimizer(model)
        self.at("register")
        with kind(model, optimizer, sync_every=2, exchange=spec) as rounds:
            self.hook = rounds.hook
            for step in range(STEPS):
                self._step(model, optimizer, step)
                if step == SAVE_AT:
                    self._save(rounds.state_dict)
            self.at("close")

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self.is_due("raise in exchange", step):
            assert self.hook is not None
            self.hook.runner.lanes.comm = _raise  # type: ignore[attr-defined]
        optimizer.zero_grad()
        self.at("forward", step)
        loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
        self.at("backward", step)
        loss.backward()
        self.at("optimizer", step)
        if self.is_due("raise in optimizer", step):
            raise _Mistake(MISTAKE)
        optimizer.step()

    def _save(self, state: Callable[[], dict[str, Any]]) -> None:
        self.at("save")
        full = self.is_due("full disk", SAVE_AT)
        with Path("/dev/full" if full else f"{self.folder}/{self.rank}.pt").open("wb") as file:
            torch.save(state(), file)

    def report(self, error: BaseException | None) -> Report:
        """What to say at the end, after everything was closed."""
        text, now = "" if error is None else f"{type(error).__name__}: {error}", time.monotonic()
        if self.hook is not None and not isinstance(error, _Mistake | OSError):
            self.hook.close()
        left = tuple(t.name for t in threading.enumerate() if t.name.startswith("gradwire") and t.is_alive())
        return Report(self.rank, text, now, left)


def _raise(ticket: int) -> Any:
    raise _Mistake(MISTAKE)


def _main(rank: int, fault: Fault, port: int, folder: str, pipe: Any, links: Links | None) -> None:
    """A rank as a script would be: an error ends the process the way an interpreter ends."""
    if links is not None:
        links.enter(rank)
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # a forked process forgets its atexit
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process
    os.dup2(sys.stderr.fileno(), 2)
    this, error = _Rank(rank, fault, folder, pipe), None
    try:
        this.train(LOCAL_HOST if links is None else links.address, port)
    except Exception as caught:
        error = caught
    pipe.send(this.report(error))
    if error is not None:
        sys.last_value = error
    atexit._run_exitfuncs()
    os._exit(0 if error is None else 1)
