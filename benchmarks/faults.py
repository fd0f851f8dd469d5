"""A campaign of faults: what do the other ranks do when one is killed, stopped, or fails, at any moment?

    python benchmarks/faults.py --faults 1080 --links 120 --seed 0

Each fault trains a small model on 2 to 4 ranks of its own. The survivors must raise in time, and name the rank that
failed or its error; nothing may hang, and no thread or process may be left. Prints how long they took, by kind.
Faults of the network (`--links`, as root) cut the link of one rank for longer than the time limit, or for a second, or
slow it down; the last two must not end training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import netns
from gradwire.testing.faults import KINDS, LINK_KINDS, MOMENTS, SAVE_AT, SIGNALS, STEPS, Fault, Outcome, strike
from gradwire.tools.records.table import text_table

SPECS = (
    "exact",
    "bf16",
    "fp16:feedback=true",
    "int8",
    "int4:feedback=true",
    "int2",
    "sign",
    "topk",
    "powersgd:rank=1,min_compression=0.5",
)
SHARDED = ("exact", "bf16", "int8", "int4:feedback=true,residual=int8")
LOCAL = ("exact", "int8", "int4:feedback=true")
SUBJECTS = (
    *(f"ddp {spec}" for spec in SPECS),
    *(f"fsdp {spec}" for spec in SHARDED),
    *(f"{kind} {spec}" for kind in ("local_sgd", "diloco") for spec in LOCAL),
)
LONGEST_DELAY_S = 0.02
"""About one step, so that a signal can come anywhere in it."""


def faults(count: int, seed: int) -> Iterator[Fault]:
    """Random faults. The first ones go through all subjects and all kinds.

    A rank that is stopped before init_process_group, and comes back when the others have left, is torch's to end.
    """
    draw = random.Random(seed)
    for number in range(count):
        size = draw.randint(2, 4)
        subject, kind = SUBJECTS[number % len(SUBJECTS)], KINDS[number % len(KINDS)]
        moments = [moment for moment in MOMENTS if has(subject, moment) and (kind, moment) != ("stop", "start")]
        moment = draw.choice(moments) if kind in SIGNALS or kind in ("exit", "raise") else "step"
        step = SAVE_AT if kind == "full disk" else draw.randrange(STEPS - 2)  # a step that others wait for follows
        yield Fault(kind, moment, step, draw.uniform(0.0, LONGEST_DELAY_S), draw.randrange(size), size, subject)


def link_faults(count: int, seed: int) -> Iterator[Fault]:
    """Random faults of the network, while the model trains: a store behind a cut link stops torch's own start-up."""
    draw = random.Random(f"links {seed}")
    for number in range(count):
        subject, kind, size = SUBJECTS[number % len(SUBJECTS)], LINK_KINDS[number % len(LINK_KINDS)], draw.randint(2, 4)
        moment = draw.choice([moment for moment in MOMENTS[2:-2] if has(subject, moment)])
        yield Fault(kind, moment, draw.randrange(STEPS - 2), 0.0, draw.randrange(size), size, subject)


def outcomes_of(args: argparse.Namespace) -> Iterator[Outcome]:
    """All outcomes, as they come: several at a time, but those of the network one after the other."""
    with ThreadPoolExecutor(args.jobs) as pool:
        yield from pool.map(strike, faults(args.faults, args.seed))
    if args.links:
        with netns.links(4) as links:
            yield from (strike(fault, links) for fault in link_faults(args.links, args.seed))


def has(subject: str, moment: str) -> bool:
    """Whether training of this kind has such a moment."""
    return subject.startswith(("ddp", "fsdp")) or moment not in ("switch", "verify")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign. Returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1200, help="how many (default: 1200)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time (default: cores)")
    parser.add_argument("--out", type=Path, help="a file for one JSON line per fault")
    parser.add_argument("--links", type=int, default=0, help="how many more, of the network (needs root; default: 0)")
    args = parser.parse_args(argv)
    outcomes = []
    for number, outcome in enumerate(outcomes_of(args), 1):
        outcomes.append(outcome)
        for problem in outcome.problems():
            print(f"{number}: {outcome.fault}: {problem}", flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(record(outcome)) + "\n")
        if number % 100 == 0:
            print(f"{number} of {args.faults + args.links}", flush=True)
    print(summary(outcomes))
    return int(any(outcome.problems() for outcome in outcomes))


def record(outcome: Outcome) -> dict[str, object]:
    """One line of the file."""
    return {"fault": str(outcome.fault), "seconds": outcome.seconds, "problems": outcome.problems()}


def summary(outcomes: Sequence[Outcome]) -> str:
    """How long the survivors took, by kind, and how much went wrong."""
    rows = [["fault", "faults", "survivors that raised", "median s", "90% s", "worst s", "with problems"]]
    for kind in (*KINDS, *LINK_KINDS):
        of_kind = [outcome for outcome in outcomes if outcome.fault.kind == kind]
        seconds = sorted(second for outcome in of_kind for second in outcome.seconds)
        if of_kind:
            rows.append([kind, str(len(of_kind)), str(len(seconds)), *_quantiles(seconds), str(_bad(of_kind))])
    hung = sum(len(outcome.hung) for outcome in outcomes)
    total = f"{len(outcomes)} faults, {hung} ranks hung, {_bad(outcomes)} with problems"
    return f"{text_table(rows, right=range(1, 7))}\n{total}"


def _bad(outcomes: Sequence[Outcome]) -> int:
    return sum(bool(outcome.problems()) for outcome in outcomes)


def _quantiles(seconds: Sequence[float]) -> list[str]:
    if not seconds:
        return ["", "", ""]
    ninety = seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))]
    return [f"{value:.2f}" for value in (statistics.median(seconds), ninety, seconds[-1])]


if __name__ == "__main__":
    raise SystemExit(main())
