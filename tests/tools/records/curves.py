"""Runs of `gradwire compare` that were never run."""

import math
import random

from gradwire.tools.records.curves import Conditions, Curve

CONDITIONS = Conditions(
    script=("train.py", "--epochs", "3"),
    source="",
    nproc=2,
    steps=200,
    link=None,
    gather=None,
    metric=None,
    seed_arg=None,
    torch="2.13.0",
)


def curve(name, seed, losses, *, step_s=0.1, failed="", **more):
    return Curve(
        conditions=more.pop("conditions", CONDITIONS),
        name=name,
        hook=name,
        seed=seed,
        ranks=2,
        losses=tuple(losses),
        first=(5.5, 5.4),
        step_s=step_s,
        quartiles_s=(step_s, step_s),
        sent_bytes=1e6,
        failed=failed,
        **more,
    )


def falling(seed, gap=0.0, spread=0.004, steps=200):
    """The batches make the same noise under every hook; the seed moves the whole curve; `spread` is the hook's own."""
    batches, own = random.Random(seed), random.Random(f"{seed} {gap} {spread}")
    moved, mine = batches.gauss(0, 0.03), own.gauss(gap, spread)
    return [2 + 3 * math.exp(-at / 30) + batches.gauss(0, 0.1) + moved + mine for at in range(steps)]


def runs(gaps, seeds=5, step_s=None):
    """`exact` and hooks with these true gaps, as (gap, spread)."""
    names = {"exact": (0.0, 0.0), **gaps}
    times = {"exact": 0.3, **(step_s or {})}
    return [
        curve(name, seed, falling(seed, *names[name]), step_s=times.get(name, 0.1))
        for seed in range(seeds)
        for name in names
    ]
