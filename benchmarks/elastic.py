"""DiLoCo while ranks are killed and come back: how much slower, and to which loss, than without faults?

    python benchmarks/elastic.py --ranks 4 --minutes 30 --fault-every-s 30

Trains twice for the same time, at first without faults. Every rank is a process of its own; one that was killed is
started again, and one that was stopped goes on. A step takes at least --step-ms, as if every rank had a machine of its
own. Prints the throughput of both, the loss on held-out text, and the number of faults.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from typing import Any

import torch

from gradwire._torch import TCPStore
from gradwire.engine.fingerprint import fingerprint
from gradwire.optim import DiLoCo, Shrink
from gradwire.testing.processes import PRELOAD
from gradwire.tools.records.table import text_table
from gradwire.tools.workload import Workload, WorkloadSettings

SETTINGS = WorkloadSettings(layers=2, width=128, text_bytes=1_000_000)
AHEAD = 3
"""By how many rounds the end is announced, so that all ranks learn of it in time."""


@dataclass
class Run:
    """What came of one training."""

    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    """The steps that all ranks together have taken in each round, by the step at its end. Those of a killed rank in its
    last round are not in it."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """When each round has ended, by step."""
    ends: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    starts: set[int] = field(default_factory=set)
    """The epochs in which the training began without anybody's state: more than one is a restart of the job."""

    @property
    def loss(self) -> float:
        """On held-out text, of the model that all ranks hold at the end."""
        totals, counts = zip(*(end["loss"] for end in self.ends), strict=True)
        return float(sum(totals) / sum(counts))

    def gaps(self) -> list[float]:
        """The seconds between the ends of rounds."""
        times = [self.ended_s[step] for step in sorted(self.ended_s)]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


class Ranks:
    """The processes, what they report, and what happens to them."""

    def __init__(self, args: argparse.Namespace, fault_every_s: float) -> None:
        self.args, self.run = args, Run()
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload([PRELOAD])
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.draw, self.mean_s = random.Random(args.seed), fault_every_s
        self.alive: dict[int, tuple[Any, Any]] = {}
        self.due: list[tuple[float, str, int]] = []
        """What is to happen, and when: "start", "continue" or "fault", and to which rank."""

    def train(self) -> Run:
        """Train for the time wanted, then to the end of a round on all ranks."""
        for number in range(self.args.ranks):
            self._start(number)
        while not self.run.ended_s:
            self._listen()
        began = time.monotonic()
        self._plan_fault()
        while time.monotonic() < began + 60 * self.args.minutes:
            self._listen()
            self._act()
        self.due = [(0.0, what, number) for _, what, number in self.due if what != "fault"]
        self._act()
        self.store.set("stop_at", str(max(self.run.ended_s) + AHEAD * self.args.sync_every))
        while self.alive:
            self._listen()
        self.run.seconds = max(self.run.ended_s.values()) - min(self.run.ended_s.values())
        return self.run

    def _start(self, number: int) -> None:
        mine, theirs = self.context.Pipe()
        process = self.context.Process(target=rank_main, args=(number, self.store.port, self.args, theirs), daemon=True)
        process.start()
        theirs.close()
        self.alive[number] = process, mine

    def _listen(self) -> None:
        numbers = {pipe: number for number, (_, pipe) in self.alive.items()}
        ready: list[Any] = connection.wait(list(numbers), timeout=0.05)
        for pipe in ready:
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):  # it has ended
                self.alive.pop(numbers[pipe])[0].join()
                continue
            self._note(kind, value)

    def _note(self, kind: str, value: Any) -> None:
        if kind == "round":
            step, taken = value
            self.run.taken[step] = self.run.taken.get(step, 0) + taken
            self.run.ended_s.setdefault(step, time.monotonic())
        elif kind == "start":
            self.run.starts.add(value)
        elif kind == "end":
            self.run.ends.append(value)
        else:
            self.run.errors.append(value)

    def _plan_fault(self) -> None:
        if self.mean_s:
            wait_s = self.draw.expovariate(1 / self.mean_s)
            self.due.append((time.monotonic() + wait_s, "fault", self.draw.randrange(self.args.ranks)))

    def _act(self) -> None:
        now = time.monotonic()
        for item in [item for item in self.due if item[0] <= now]:
            self.due.remove(item)
            _, what, number = item
            if what == "start":
                self._start(number)
            elif what == "continue":
                os.kill(self.alive[number][0].pid, signal.SIGCONT)
            else:
                self._strike(number)
                self._plan_fault()

    def _strike(self, number: int) -> None:
        """Kill or stop a rank, unless it is away already."""
        if number not in self.alive or any(other == number for _, _, other in self.due):
            return
        kind = "stop" if self.draw.random() < self.args.stops else "kill"
        self.run.faults[kind] = self.run.faults.get(kind, 0) + 1
        process = self.alive[number][0]
        os.kill(process.pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "kill":
            self.alive.pop(number)
            process.join()
        back_s = 2 * self.args.timeout_s if kind == "stop" else self.args.away_s
        self.due.append((time.monotonic() + back_s, "continue" if kind == "stop" else "start", number))


# -- one rank --------------------------------------------------------------------------------------------------------


def rank_main(number: int, port: int, args: argparse.Namespace, pipe: Any) -> None:
    """Train until the parent says when to stop."""
    torch.set_num_threads(1)
    try:
        pipe.send(("end", rank_train(number, port, args, pipe)))
    except Exception:
        pipe.send(("error", f"rank {number}: {traceback.format_exc()}"))
    os._exit(0)


def rank_train(number: int, port: int, args: argparse.Namespace, pipe: Any) -> dict[str, Any]:
    """An ordinary loop, which counts by `rounds.steps`."""
    told = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    workload = Workload(SETTINGS, seed=args.seed, rank=number, size=args.ranks)
    model = workload.model()
    optimizer = workload.optimizer(model)
    shrink = Shrink(f"127.0.0.1:{port}", ranks=args.ranks, timeout_s=args.timeout_s)
    stop_at, taken = None, 0
    options = {"exchange": args.exchange, "fragments": args.fragments, "on_failure": shrink}
    with DiLoCo(model, optimizer, sync_every=args.sync_every, **options) as rounds:
        assert rounds.members is not None
        if rounds.members.holders == 0:
            pipe.send(("start", rounds.members.epoch))
        while stop_at is None or rounds.steps < stop_at:
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = workload.learning_rate(rounds.steps)
            optimizer.zero_grad()
            workload.loss(model, workload.batch(rounds.steps)).backward()
            time.sleep(max(0.0, args.step_ms / 1e3 - (time.perf_counter() - began)))
            optimizer.step()
            taken += 1
            if rounds.steps % args.sync_every == 0:
                pipe.send(("round", (rounds.steps, taken)))
                taken = 0
                stop_at = int(told.get("stop_at")) if told.check(["stop_at"]) else None
    same = [int(fingerprint(param)) for param in model.parameters()]
    return {"loss": workload.held_out_loss(model), "steps": rounds.steps, "same": same}


# -- the table -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Train with and without faults, and compare."""
    args = parse_args()
    print(f"{args.ranks} ranks, DiLoCo {args.exchange}, {args.sync_every} steps a round, {args.minutes:g} min each")
    calm = Ranks(args, 0.0).train()
    faulty = Ranks(args, args.fault_every_s).train()
    heads = ("", "faults", "rounds/s", "rank steps/s", "longest round s", "mean ranks", "loss")
    print(text_table([heads, row("without", calm, args), row("with faults", faulty, args)]))
    for key, text in (("rounds", "rounds"), ("steps", "steps of all ranks")):
        print(f"throughput in {text}: {rate(faulty, key) / rate(calm, key):.1%} of that without faults")
    print(f"restarts of the job: {len(faulty.starts) - 1}; ranks that ended with an error: {len(faulty.errors)}")
    print(f"the {len(faulty.ends)} ranks at the end hold the same parameters: {are_same(faulty)}")
    for error in faulty.errors:
        print(error)


def rate(run: Run, key: str) -> float:
    """Rounds per second, or the steps of all ranks that count."""
    steps = sorted(run.taken)[1:]
    return (len(steps) if key == "rounds" else sum(run.taken[step] for step in steps)) / run.seconds


def row(name: str, run: Run, args: argparse.Namespace) -> list[str]:
    """A line of the table."""
    faults = " ".join(f"{count} {kind}" for kind, count in sorted(run.faults.items())) or "0"
    speeds = [f"{rate(run, 'rounds'):.3f}", f"{rate(run, 'steps'):.2f}", f"{max(run.gaps()):.2f}"]
    ranks = rate(run, "steps") / rate(run, "rounds") / args.sync_every
    return [name, faults, *speeds, f"{ranks:.2f}", f"{run.loss:.4f}"]


def are_same(run: Run) -> bool:
    """Whether all ranks have ended at the same step with the same parameters."""
    return len({(end["steps"], *end["same"]) for end in run.ends}) == 1


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0, help="for each of the two trainings")
    parser.add_argument("--fault-every-s", type=float, default=30.0, help="on average, at random moments")
    parser.add_argument("--stops", type=float, default=0.0, help="the share of faults that stop a rank for a while")
    parser.add_argument("--away-s", type=float, default=1.0, help="how long a killed rank stays away")
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=100.0, help="a step takes at least so long")
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--exchange", default="int4:feedback=true")
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
