"""auto for models with `fully_shard`: chooses how gradients are reduced and how parameters are gathered, together.

A candidate is a pair such as `int8/bf16`: gradients in int8, parameters in bf16. `int8` alone gathers exactly. It is a
pilot like that of DDP models, with three differences:

- A step begins with the first gather of a forward pass. Both directions change there, so that forward and backward use
  the same parameters.
- The error of a candidate is that of its reduce-scatter. It is measured message by message while one backward pass
  runs, so that no copy of the whole model's gradients is kept.
- Among equally fast candidates with the same error, the one that gathers more exactly is chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradwire.auto.pilot import WARM_STEPS, Pilot
from gradwire.auto.settings import Auto
from gradwire.engine.sharded import ShardedHook
from gradwire.exchanges import Exchange, exchange
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.sharded import check_gathers, check_scatters, scatter_

HOOKS = ("exact", "bf16", "int8", "int4")
"""The candidates for the gradients, unless the user names others."""
GATHERS = ("exact", "bf16")
"""The candidates for the parameters. Fewer bits change the training, so they are used on request only."""


def pair_name(spec: str, gather: str) -> str:
    """`int8/bf16`; the gather is left out if it is exact."""
    return spec if gather == "exact" else f"{spec}/{gather}"


def split_pair(name: str) -> tuple[str, str]:
    """The inverse of `pair_name`, with both specs checked and written in full. SpecError if one cannot do its part."""
    spec, _, gather = name.partition("/")
    scatters, gathers = exchange(spec), exchange(gather or "exact")
    check_scatters(scatters)
    check_gathers(gathers)
    return str(scatters), str(gathers)


def pairs(settings: Auto, gathers: Sequence[str]) -> list[str]:
    """The candidates for a model that can gather in these ways. The first one is the most exact."""
    specs = [str(exchange(spec)) for spec in HOOKS] if settings.hooks == Auto().hooks else settings.specs
    names = [pair_name(spec, gather) for spec, gather in itertools.product(specs, gathers)]
    return [pair_name(*split_pair(name)) for name in names]


class Paired:
    """Makes a pilot choose among pairs: the part of `ShardedPilot` that other pilots can have too."""

    def __init__(self, hook: ShardedHook, settings: Auto, *, names: Sequence[str], **options: Any) -> None:
        self._given = list(names)
        self._sharded = hook
        self._agreed_gathers: set[str] = set()
        self._lost: dict[str, float] = {}
        self._total = 0.0
        super().__init__(hook, settings, **options)  # type: ignore[call-arg]
        for name in names:
            exchange(split_pair(name)[1]).warm_up(hook.device)

    def _all_names(self) -> list[str]:
        return self._given

    def _exchange(self, name: str) -> Exchange:
        return exchange(split_pair(name)[0])

    def _current(self) -> str:
        return pair_name(str(self._sharded.exchange), str(self._sharded.gathers))

    def _switch(self, name: str) -> None:
        if self._current() == name:
            return
        hook, pilot, (spec, gather) = self._sharded, cast(Pilot, self), split_pair(name)
        if str(hook.exchange) != spec:
            hook.use(exchange(spec), agreed=spec in pilot._agreed)
            pilot._agreed.add(spec)
        if str(hook.gathers) != gather:
            hook.use_gather(exchange(gather), agreed=gather in self._agreed_gathers)
            self._agreed_gathers.add(gather)
        hook.reset_stats()

    def on_bucket(self, bucket: Bucket) -> None:
        """The rows of a unit's gradients, (size, n): add up what each candidate loses of them, in one step."""
        if cast(Pilot, self)._step != WARM_STEPS + 1:
            return
        mean = self._reduced(bucket, None)
        self._total += float(mean.square().sum())
        for spec in dict.fromkeys(split_pair(name)[0] for name in self._given):  # in the same order on all ranks
            coded = exchange(spec)
            lost = self._reduced(bucket, coded) - mean if isinstance(coded, Coded) else torch.zeros(1)
            self._lost[spec] = self._lost.get(spec, 0.0) + float(lost.square().sum())

    def _reduced(self, bucket: Bucket, coded: Coded | None) -> Tensor:
        """The mean of this rank's row, in double precision; without `coded` it is exact."""
        rows, found = bucket.flat, list[Tensor]()

        def run(comm: Comm) -> None:
            if coded is None:
                found.append(comm.all_to_all(rows.double()).mean(0))
                return
            out = torch.empty(rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
            scatter_(coded, rows, out, bucket, comm, 1 / comm.size)
            found.append(out.double())

        self._sharded.run(run)
        return found[0]

    def _has_gradients(self) -> bool:
        return True

    def _measure_errors(self) -> dict[str, float] | None:
        specs = list(self._lost)
        mine = torch.tensor([self._total, *self._lost.values()], dtype=torch.float64, device=self._sharded.device)
        total, *lost = self._sharded.gather(mine).sum(0).tolist()
        self._lost, self._total = {}, 0.0
        if not 0.0 < total < math.inf:
            return None
        errors = {spec: math.sqrt(value / total) for spec, value in zip(specs, lost, strict=True)}
        return {name: errors[split_pair(name)[0]] for name in self._given}


class ShardedPilot(Paired, Pilot):
    """Chooses both directions of one hook."""
