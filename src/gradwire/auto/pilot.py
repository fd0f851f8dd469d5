"""Pilot: chooses the hook that is fastest for this model on this network, by trying candidates while the model trains.

1. A few exact steps, until DDP has its final buckets; then the gradients of one step are copied.
2. Every candidate averages these gradients, and drops out if its error is above `max_error`, unless it is `trusted`.
3. The others take turns, step by step, until it is clear which is fastest (`trial.py`). All ranks gather all times; the
   slowest rank counts.
4. The most exact candidate within 3% of the fastest is chosen. If that is `exact`, compression does not pay here.
5. Every `WATCH` steps the ranks compare times. When a step has become 25% slower or faster than it was, or after
   `recheck` steps, the trial starts again. The current hook stays unless another one is more than 5% faster.

All ranks decide from the same numbers, at the same step. On an accelerator a step lasts from one event on the stream
that computes to the next, and events are read when a round is over, where the ranks exchange their times anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import random
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.auto.settings import Auto
from gradwire.auto.trial import Trial
from gradwire.engine.events import Moment, each_seconds, now
from gradwire.engine.hook import Hook
from gradwire.exchanges import Exchange, exchange
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket

log = logging.getLogger("gradwire")

WARM_STEPS = 2
TURN_STEPS = 4
"""The number of steps that each candidate takes in a round, alternating with the others: whatever else the machine does
slows neighbouring steps alike, which removes two thirds of the variance."""
WATCH = 50
WORTH, MOVED = 1.05, 1.25
"""Ratios of step times: another hook is worth a change; the link has changed."""
PATIENCE, ASK, IDLE = 2000, 10, 50
"""In steps: how long a model waits for the trial of another model, how often it checks, and after how many steps of
others a model counts as no longer training."""
_pilots: weakref.WeakSet[Pilot] = weakref.WeakSet()
_ticks = itertools.count()
"""Counts the steps of all models of this process."""


Span = tuple[Moment, Moment]


class Pilot:
    """Chooses the exchange of one hook. The thread that runs backward calls `on_step` and `on_bucket`, on all ranks."""

    def __init__(self, hook: Hook, settings: Auto, clock: Callable[[], Moment] | None = None) -> None:
        self.settings = settings
        self._clock = clock or functools.partial(now, hook.device)
        self.reason = "measuring"
        """Why the hook uses its exchange, in a sentence."""
        self._hook = hook
        self._names = self._all_names()
        """The candidates. The first one is the most exact."""
        self._exchanges = {name: self._exchange(name) for name in self._names}
        for each in self._exchanges.values():  # compiles all kernels now and not in a step
            each.warm_up(hook.device)
        self._errors: dict[str, float] = {}
        self._chosen: str | None = None
        self._agreed: set[str] = set()
        self._start_over()
        _pilots.add(self)

    def _start_over(self) -> None:
        self._step = self._waited = self._tick = 0
        self._on_trial = False
        self._aside: list[tuple[Bucket, Tensor]] = []
        self._trial: Trial | None = None
        self._plan: deque[tuple[str, bool]] = deque()
        """The next steps: the candidate of each, and whether its time counts."""
        self._counts = False
        self._times: dict[str, list[Span]] = {}
        self._recent: deque[Span] = deque(maxlen=WATCH)
        self._began: Moment | None = None

    # -- called by the hook ------------------------------------------------------------------------------------

    def on_step(self) -> None:
        """A step begins: record the time of the one before, and do what comes next."""
        self._note_time()
        self._tick = next(_ticks)
        if self._step == WARM_STEPS:
            self._on_trial = self._is_free()
            self._step -= not self._on_trial
        if self._step == WARM_STEPS + 1:
            self._weigh()
        if self._trial is not None:
            self._take_turns(self._trial)
        elif self._step > WARM_STEPS + 1:
            self._watch()
        self._step += 1
        self._began = self._clock()

    def on_bucket(self, bucket: Bucket) -> None:
        """Copy the local gradients of one step."""
        if self._step == WARM_STEPS + 1 and not bucket.flat.is_sparse:
            self._aside.append((bucket, bucket.flat.clone()))

    # -- the phases --------------------------------------------------------------------------------------------

    def _is_free(self) -> bool:
        """Whether no other model of this process is on trial, on any rank: each would time the steps of the other."""
        others = [pilot for pilot in _pilots if pilot._on_trial and self._tick - pilot._tick <= IDLE]
        self._waited += 1
        if self._waited % ASK != 1:
            return False
        (waiting,) = self._slowest([float(bool(others))])
        return not waiting or self._waited > PATIENCE

    def _note_time(self) -> None:
        if self._began is None:
            return
        step = (self._began, self._clock())
        if self._trial is None:
            self._recent.append(step)
        elif self._counts:
            self._times.setdefault(self._current(), []).append(step)

    def _weigh(self) -> None:
        """Drop the candidates whose error is too large; plan the turns of the others."""
        if not self._has_gradients():
            self._settle(self._names[0], "all gradients are sparse, and those travel exactly")
            return
        errors = self._measure_errors()
        self._aside.clear()
        if errors is None:  # for instance a step that AMP skips: use the next one
            self._step = WARM_STEPS
            return
        self._errors = errors
        taking_part = self._candidates()
        if taking_part == self._names[:1]:
            self._settle(self._names[0], f"no other candidate is within max_error={self.settings.max_error:g}")
        else:
            self._trial = self._new_trial({spec: self._errors[spec] for spec in taking_part})

    def _has_gradients(self) -> bool:
        return bool(self._aside)

    def _measure_errors(self) -> dict[str, float] | None:
        """The error of every candidate on the gradients of one step; None if these are zero or not finite."""
        exact = [values.double() for _, values in self._aside]
        self._hook.run(lambda comm: _mean_all_(comm, exact))
        total = math.sqrt(sum(float(mean.square().sum()) for mean in exact))
        if not 0.0 < total < math.inf:
            return None
        return {name: self._error(name, exact, total) for name in self._names}

    def _new_trial(self, errors: Mapping[str, float]) -> Trial:
        return Trial(errors)

    def _candidates(self) -> list[str]:
        """The candidates that take part in the trial."""
        allows, errors = self.settings.allows, self._errors
        return [name for name in self._names if allows(name.partition("/")[0], errors[name])]

    def _error(self, spec: str, exact: Sequence[Tensor], total: float) -> float:
        self._switch(spec)
        lost = 0.0
        for (bucket, values), mean in zip(self._aside, exact, strict=True):
            trial = values.clone()
            self._hook.try_out(dataclasses.replace(bucket, flat=trial))
            lost += float((trial.double() - mean).square().sum())
        return math.sqrt(lost) / total

    def _take_turns(self, trial: Trial) -> None:
        if not self._plan and self._times:
            self._end_round(trial)
            if trial.is_over:
                self._decide(trial)
                return
        if not self._plan:
            self._plan_round(trial)
        spec, counts = self._plan.popleft()
        self._switch(spec)
        self._counts = counts

    def _plan_round(self, trial: Trial) -> None:
        """In a new order each time, the same on all ranks: what a script does every few steps must favour nobody.

        The first step of all touches new memory, and does not count.
        """
        chance = random.Random(self._step)
        steps = [spec for _ in range(TURN_STEPS) for spec in chance.sample(trial.left, len(trial.left))]
        if trial.rounds == 0:
            self._plan.extend((spec, False) for spec in trial.left)
        before = self._current() if trial.rounds else trial.left[-1]
        for last, spec in zip([before, *steps], steps, strict=False):
            if last != spec and any(self._exchanges[each].takes_residual for each in (last, spec)):
                self._plan.append((spec, False))  # it applies pending residuals, or allocates new ones
            self._plan.append((spec, True))

    def _end_round(self, trial: Trial) -> None:
        """A round is over. All ranks continue with the same times."""
        slowest = self._slowest([time_s for steps in self._times.values() for time_s in each_seconds(steps)])
        starts = range(0, len(slowest), TURN_STEPS)
        trial.add({spec: slowest[at : at + TURN_STEPS] for spec, at in zip(self._times, starts, strict=True)})
        self._times = {}

    def _decide(self, trial: Trial) -> None:
        """Keep the current hook, unless a change is worth it."""
        times_s, pick = trial.times_s, trial.pick
        if self._chosen in times_s and times_s[self._chosen] <= WORTH * times_s[pick]:
            pick = self._chosen
        self._trial = None
        self._settle(pick, _reason(pick, times_s, self._errors, self.settings.max_error))
        self._expected = trial.medians[pick]

    def _settle(self, spec: str, reason: str) -> None:
        self._switch(spec)
        self._chosen, self.reason, self._on_trial = spec, f"{spec}: {reason}", False
        self._times, self._expected = {}, 0.0
        self._recent.clear()
        log.info("auto, after %d steps: %s", self._hook.steps, self.reason)

    def _watch(self) -> None:
        """Start again if the slowest rank's median step time has changed, or `recheck` is reached."""
        if len(self._recent) < WATCH:
            return
        (now_s,) = self._slowest([statistics.median(each_seconds(self._recent))])
        self._recent.clear()
        if not self._expected:
            self._expected = now_s
        moved = not self._expected / MOVED <= now_s <= self._expected * MOVED
        if moved or self._step >= self.settings.recheck:
            why = (
                f"a step takes {1e3 * now_s:.0f} ms, not {1e3 * self._expected:.0f}" if moved else "recheck is reached"
            )
            log.info("auto: measuring again, because %s", why)
            self._start_over()

    # -- machinery ---------------------------------------------------------------------------------------------

    def _all_names(self) -> list[str]:
        return self.settings.specs

    def _exchange(self, name: str) -> Exchange:
        return exchange(name)

    def _current(self) -> str:
        """The candidate in use."""
        return str(self._hook.exchange)

    def _switch(self, spec: str) -> None:
        if self._current() != spec:
            self._hook.use(self._exchanges[spec], agreed=spec in self._agreed)
            self._agreed.add(spec)

    def _slowest(self, times: Sequence[float]) -> list[float]:
        mine = torch.tensor(times, dtype=torch.float64, device=self._hook.device)
        return self._hook.gather(mine).amax(0).tolist()


def _mean_all_(comm: Comm, values: Sequence[Tensor]) -> None:
    sizes = [value.numel() for value in values]
    total = comm.all_reduce_(torch.cat(list(values))) / comm.size
    for value, mean in zip(values, total.split(sizes), strict=True):
        value.copy_(mean)


def _reason(pick: str, times_s: dict[str, float], errors: dict[str, float], limit: float) -> str:
    times = ", ".join(f"{spec} {1e3 * value:.0f}" for spec, value in times_s.items())
    out = ", ".join(f"{spec} {error:.2g}" for spec, error in errors.items() if spec not in times_s)
    left = f"; left out for their error: {out}" if out else ""
    allowed = f"of at most {limit:g}" if errors[pick] <= limit else "is trusted"
    what = "compression does not pay here" if pick == "exact" else f"error {errors[pick]:.2g} {allowed}"
    return f"{what}; ms per step of the slowest rank: {times}{left}"
