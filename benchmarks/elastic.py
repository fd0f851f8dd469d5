"""DiLoCo while ranks are killed and come back: how much slower, and to which loss, than without faults?

    python benchmarks/elastic.py --ranks 4 --minutes 30 --fault-every-s 30

Several trainings run side by side for the same time, so that all of them meet the same conditions: one without faults,
one with faults, and one without faults from another seed, whose loss shows how much losses differ by chance. Every
rank is a process of its own; one that was killed is started again, and one that was stopped goes on. The last rank
that has the state of the training is never hit. A step takes at least --step-ms, most of which is sleep, as if every
rank had an accelerator of its own.

Two throughputs are compared, both between the first and the last round that end while faults occur:

- rounds per second: how fast the training goes on. A rank that is away does not count against it.
- steps of all ranks per second: only steps whose round the rank has completed count. Those that a killed rank took
  since its last complete round are lost, and so is the time until it trains again, its start included.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import random
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
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

SETTINGS = WorkloadSettings(layers=2, width=64, text_bytes=1_000_000, eval_windows=256)
AHEAD = 3
"""By how many rounds the end is announced, so that all ranks learn of it in time."""
LIMIT_S = 600.0
"""How long the last ranks may take to come back at the end."""


@dataclass
class Run:
    """What came of one training."""

    cut_s: float = math.inf
    """When the time was over. Later rounds do not count."""
    faults: dict[str, int] = field(default_factory=dict)
    taken: dict[int, dict[int, int]] = field(default_factory=dict)
    """The steps that each rank has taken in each round, by the step at its end."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """When each round has ended on the first rank, by step."""
    ends: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    starts: set[int] = field(default_factory=set)
    """The epochs in which the training began without anybody's state: more than one is a restart of the job."""
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    """How long the members of a group waited until the next one was formed, if it was smaller, and if it was larger."""

    @property
    def loss(self) -> float:
        """On held-out text, of the model that all ranks hold at the end."""
        totals, counts = zip(*(end["loss"] for end in self.ends), strict=True)
        return float(sum(totals) / sum(counts))

    def rounds(self) -> list[int]:
        """The rounds that count, by the step at their end; the first one only starts the clock."""
        return sorted(step for step, ended_s in self.ended_s.items() if ended_s <= self.cut_s)

    def gaps(self) -> list[float]:
        """The seconds between the ends of rounds."""
        return [self.ended_s[later] - self.ended_s[earlier] for earlier, later in itertools.pairwise(self.rounds())]

    def rate(self, key: str) -> float:
        """Rounds per second, or the steps of all ranks that count."""
        rounds = self.rounds()[1:]
        count = len(rounds) if key == "rounds" else sum(sum(self.taken[step].values()) for step in rounds)
        return count / sum(self.gaps())


class Ranks:
    """The processes of one training, what they report, and what happens to them."""

    def __init__(self, args: argparse.Namespace, seed: int, fault_every_s: float = 0.0) -> None:
        self.args, self.seed, self.run = args, seed, Run()
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload([PRELOAD])
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.draw, self.mean_s = random.Random(args.seed), fault_every_s
        self.alive: dict[int, tuple[Any, Any]] = {}
        self.trained: set[int] = set()
        """Ranks that have completed a round since they were started."""
        self.due: list[tuple[float, str, int]] = []
        """What is to happen, and when: "start", "continue" or "fault", and to which rank."""
        for number in range(args.ranks):
            self._start(number)

    def _start(self, number: int) -> None:
        mine, theirs = self.context.Pipe()
        args = (number, self.store.port, self.seed, self.args, theirs)
        process = self.context.Process(target=rank_main, args=args, daemon=True)
        process.start()
        theirs.close()
        self.alive[number] = process, mine

    # -- what they report

    @property
    def pipes(self) -> dict[Any, int]:
        """Where ranks report, and which ones."""
        return {pipe: number for number, (_, pipe) in self.alive.items()}

    def read(self, pipe: Any) -> None:
        """The next report of a rank."""
        number = self.pipes[pipe]
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):  # it has ended
            self.alive.pop(number)[0].join()
            return
        self._note(number, kind, value)

    def _note(self, number: int, kind: str, value: Any) -> None:
        if kind == "round":
            step, taken = value
            self.trained.add(number)
            self.run.taken.setdefault(step, {})[number] = taken
            self.run.ended_s.setdefault(step, time.monotonic())
        elif kind == "start":
            self.run.starts.add(value)
        elif kind == "end":
            self.run.ends.append(value)
        elif kind == "group":
            before, now, waited_s = value
            self.run.waits_s.setdefault("smaller" if now < before else "larger", []).append(waited_s)
        else:
            self.run.errors.append(value)
            print(value, flush=True)

    # -- what happens to them

    def plan_fault(self) -> None:
        """Draw the time of the next one."""
        if self.mean_s:
            wait_s = self.draw.expovariate(1 / self.mean_s)
            self.due.append((time.monotonic() + wait_s, "fault", self.draw.randrange(self.args.ranks)))

    def act(self) -> None:
        """Do what is due."""
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
                self.plan_fault()

    def _strike(self, number: int) -> None:
        """Kill or stop a rank, or another one if it is away already."""
        away = {other for _, what, other in self.due if what != "fault"}
        there = [other for other in range(self.args.ranks) if other in self.alive and other not in away]
        number = number if number in there else self.draw.choice(there)
        if not self.trained - away - {number}:
            return  # nobody else has the state: without it the job would begin again
        self.trained.discard(number)
        kind = "stop" if self.draw.random() < self.args.stops else "kill"
        self.run.faults[kind] = self.run.faults.get(kind, 0) + 1
        process = self.alive[number][0]
        os.kill(process.pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "kill":
            self.alive.pop(number)
            process.join()
        back_s = 2 * self.args.timeout_s if kind == "stop" else self.args.away_s
        self.due.append((time.monotonic() + back_s, "continue" if kind == "stop" else "start", number))

    def call_back(self) -> None:
        """No more faults; whoever is away comes back now."""
        self.run.cut_s = time.monotonic()
        self.due = [(0.0, what, number) for _, what, number in self.due if what != "fault"]
        self.act()

    def is_complete(self) -> bool:
        """Whether all ranks have ended the latest round that any of them has."""
        return len(self.run.taken[max(self.run.taken)]) == self.args.ranks

    def end(self) -> None:
        """Announce the end."""
        self.store.set("stop_at", str(max(self.run.ended_s) + AHEAD * self.args.sync_every))


def train(trainings: Sequence[Ranks], seconds: float) -> None:
    """Run the trainings side by side for some time, then to the end of a round on all ranks."""
    _listen(trainings, lambda: all(ranks.run.ended_s for ranks in trainings))
    until_s = time.monotonic() + seconds
    for ranks in trainings:
        ranks.plan_fault()
    _listen(trainings, lambda: time.monotonic() > until_s, acting=True)
    for ranks in trainings:
        ranks.call_back()
    until_s = time.monotonic() + LIMIT_S
    _listen(trainings, lambda: all(ranks.is_complete() for ranks in trainings) or time.monotonic() > until_s)
    for ranks in trainings:
        ranks.end()
    _listen(trainings, lambda: not any(ranks.alive for ranks in trainings) or time.monotonic() > until_s + LIMIT_S)


def _listen(trainings: Sequence[Ranks], over: Callable[[], bool], *, acting: bool = False) -> None:
    while not over():
        by_pipe = {pipe: ranks for ranks in trainings for pipe in ranks.pipes}
        ready: list[Any] = connection.wait(list(by_pipe), timeout=0.05)
        for pipe in ready:
            by_pipe[pipe].read(pipe)
        for ranks in trainings if acting else ():
            ranks.act()


# -- one rank --------------------------------------------------------------------------------------------------------


def rank_main(number: int, port: int, seed: int, args: argparse.Namespace, pipe: Any) -> None:
    """Train until the parent says when to stop."""
    torch.set_num_threads(1)
    log = logging.getLogger("gradwire")
    log.setLevel(logging.INFO)
    log.addHandler(Reporter(pipe))
    try:
        pipe.send(("end", rank_train(number, port, seed, args, pipe)))
    except Exception:
        pipe.send(("error", f"rank {number}: {traceback.format_exc()}"))
    os._exit(0)


class Reporter(logging.Handler):
    """Tells the parent which groups were formed, and how long that took."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """For `ElasticRounds`'s own report."""
        if isinstance(record.args, tuple) and len(record.args) == 4:
            _, now, before, waited_s = record.args
            self._pipe.send(("group", (before, now, waited_s)))


def rank_train(number: int, port: int, seed: int, args: argparse.Namespace, pipe: Any) -> dict[str, Any]:
    """An ordinary loop, which counts by `rounds.steps`."""
    told = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    workload = Workload(SETTINGS, seed=seed, rank=number, size=args.ranks)
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
    print(
        f"{args.ranks} ranks, DiLoCo {args.exchange}, {args.sync_every} steps a round, {args.minutes:g} min", flush=True
    )
    trainings = [Ranks(args, args.seed), Ranks(args, args.seed, args.fault_every_s), Ranks(args, args.seed + 1)]
    train(trainings, 60 * args.minutes)
    calm, faulty, other = (ranks.run for ranks in trainings)
    heads = ("", "faults", "rounds", "rounds/s", "rank steps/s", "longest round s", "mean ranks", "loss")
    rows = [
        row("without faults", calm, args),
        row("with faults", faulty, args),
        row("without, other seed", other, args),
    ]
    print(text_table([heads, *rows], right=range(2, 8)))
    for key, text in (("rounds", "rounds"), ("steps", "steps of all ranks")):
        print(f"throughput in {text}: {faulty.rate(key) / calm.rate(key):.1%} of that without faults")
    print(f"loss: {faulty.loss - calm.loss:+.4f} with faults, {other.loss - calm.loss:+.4f} with another seed")
    for kind, waits_s in sorted(faulty.waits_s.items()):
        median_s, most_s = statistics.median(waits_s), max(waits_s)
        print(f"a {kind} group was formed: ranks waited {median_s:.2f} s (median), {most_s:.2f} s (longest)")
    print(f"restarts of the job: {len(faulty.starts) - 1}; ranks that ended with an error: {len(faulty.errors)}")
    print(f"the {len(faulty.ends)} ranks at the end hold the same parameters: {are_same(faulty)}")
    print(f"errors without faults: {len(calm.errors) + len(other.errors)}")


def row(name: str, run: Run, args: argparse.Namespace) -> list[str]:
    """A line of the table."""
    faults = " ".join(f"{count} {kind}" for kind, count in sorted(run.faults.items())) or "0"
    speeds = [f"{run.rate('rounds'):.4f}", f"{run.rate('steps'):.3f}", f"{max(run.gaps()):.2f}"]
    ranks = run.rate("steps") / run.rate("rounds") / args.sync_every
    return [name, faults, str(len(run.gaps())), *speeds, f"{ranks:.2f}", f"{run.loss:.4f}"]


def are_same(run: Run) -> bool:
    """Whether all ranks have ended at the same step with the same parameters."""
    return len({(end["steps"], *end["same"]) for end in run.ends}) == 1


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0, help="while faults occur")
    parser.add_argument("--fault-every-s", type=float, default=30.0, help="on average, at random moments")
    parser.add_argument("--stops", type=float, default=0.0, help="the share of faults that stop a rank for a while")
    parser.add_argument("--away-s", type=float, default=1.0, help="how long a killed rank stays away")
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=200.0, help="a step takes at least so long")
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--exchange", default="int4:feedback=true")
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
