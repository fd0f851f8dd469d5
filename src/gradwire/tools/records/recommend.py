"""The one rule that decides which hook to use, or none.

`gradwire advise`, `gradwire demo`, `gradwire simulate` and the report all call `recommend`, so they cannot disagree.
The rule, in order:

1. Without communication a step must be at least 10% shorter: otherwise no hook pays.
2. A hook pays if it makes a step at least 1.10x as fast as the baseline. Where the quartiles of the step times are
   known, the middle half of its steps must also lie below the middle half of the baseline's steps.
3. Of the admissible hooks that pay, those within 3% of the fastest count as equally fast. So do those whose times
   differ from it by less than both are known to: they are a tie. The one with the smallest error is recommended.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.auto.trial import NEAR

BASELINE = "exact"
"""The hook that sends what plain DDP sends."""
NETWORK_BOUND = 0.10
"""If communication takes a smaller part of a step than this, the network does not limit the training."""
PAYS = 1.10
"""A hook that makes a step less than this many times as fast is not worth its error."""
NOISE = 0.97
"""A ceiling below this means that a step was slower without communication: the measurement is too noisy to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One hook, measured or predicted."""

    hook: str
    """Its spec."""
    step_s: float
    """Step time in seconds: the median if it was measured."""
    error: float
    """Error of the averaged gradient, relative to the exact average. The smaller one wins among equally fast hooks."""
    quartiles_s: tuple[float, float] | None = None
    """Lower and upper quartile of the step times; None if the time was predicted."""
    uncertainty: float = 0.0
    """How far the step time may be off, as a part of it: 0.05 is +-5%. 0 if that is not known."""
    excluded: str = ""
    """Why this hook must not be recommended, to stand in brackets after its name, such as `loss too high`. Empty: it is
    admissible."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do, and why."""

    hook: str | None
    """The spec to register; None: do not compress."""
    title: str
    """`Use int8`, `Do not compress`, `Too noisy to say` or `No recommendation`."""
    reason: str
    """One or more whole sentences."""
    model: str = "ddp_model"
    """What the model is called in `code`."""
    replicas: bool = False
    """Whether the hook averages across the replicas of a model (HSDP)."""

    @property
    def code(self) -> str:
        """The line to add to a program; empty if there is none."""
        if self.hook is None:
            return ""
        if self.replicas:
            return f'gradwire.hsdp({self.model}, mesh, units=units, replicas="{self.hook}")  # instead of fully_shard'
        spec, _, gather = self.hook.partition("/")  # a pair, for a model with fully_shard
        arguments = f'"{spec}", gather="{gather}"' if gather else f'"{spec}"'
        return f"gradwire.register({self.model}, {arguments})"

    def __str__(self) -> str:
        return f"{self.title}. {self.reason}"


def recommend(options: Sequence[Option], *, ceiling: float | None = None) -> Recommendation:
    """Apply the rule to the hooks of one model, link and number of ranks.

    Args:
        options: The hooks to choose from. One of them must be the baseline `exact`. Hooks that do not average, such as
            `noop`, must not be among them. Hooks that were measured but must not be recommended belong in the list
            with `excluded` set, because the reason mentions them if they are faster than the recommended hook.
        ceiling: How many times as fast a step would be without any communication (the time of `exact` by the time of
            `noop`, or `Headroom.ceiling`); None if that is not known, and then rule 1 is skipped.

    Returns:
        The recommendation. It depends on the arguments alone.
    """
    exact = next((option for option in options if option.hook == BASELINE), None)
    if exact is None:
        return Recommendation(None, "No recommendation", f"There is no measurement of {BASELINE} to compare with.")
    if ceiling is not None and (refusal := _refuse(exact, ceiling)):
        return refusal
    faster = [option for option in options if _pays(option, exact)]
    admissible = [option for option in faster if not option.excluded]
    if not admissible:
        return Recommendation(None, "Do not compress", _why_none(options, exact, ceiling))
    fastest = min(admissible, key=lambda option: option.step_s)
    best = min((option for option in admissible if _is_tie(option, fastest)), key=lambda option: option.error)
    reason = _why(best, exact, ceiling) + _chosen_by(best, fastest) + _passed_over(faster, best)
    return Recommendation(best.hook, f"Use {best.hook}", reason)


def _refuse(exact: Option, ceiling: float) -> Recommendation | None:
    """Rule 1: the answer where no hook can pay, whatever the hooks are."""
    alone = f"would take {_ms(exact.step_s / ceiling)} without communication"
    times = f"A step takes {_ms(exact.step_s)} with {BASELINE} and {alone}"
    if ceiling < NOISE:
        return Recommendation(None, "Too noisy to say", f"{times}, which cannot be. Measure again on a quiet machine.")
    exposed = max(1 - 1 / ceiling, 0.0)
    if exposed >= NETWORK_BOUND:
        return None
    reason = (
        f"The training is not network-bound. {times}: communication takes {exposed:.1%} of it, and below "
        f"{NETWORK_BOUND:.0%} no hook pays."
    )
    return Recommendation(None, "Do not compress", reason)


def _is_faster(option: Option, exact: Option) -> bool:
    """The first half of rule 2."""
    return option is not exact and exact.step_s >= PAYS * option.step_s


def _pays(option: Option, exact: Option) -> bool:
    """Rule 2."""
    if not _is_faster(option, exact):
        return False
    if option.quartiles_s is None or exact.quartiles_s is None:
        return True
    return option.quartiles_s[1] < exact.quartiles_s[0]


def _is_tie(option: Option, fastest: Option) -> bool:
    """Rule 3: whether a hook counts as fast as the fastest one."""
    return option.step_s <= fastest.step_s * max(NEAR, 1 + _margin(option, fastest))


def _margin(option: Option, other: Option) -> float:
    """The difference of two times, as a part of them, that may be due to their uncertainty."""
    return math.hypot(option.uncertainty, other.uncertainty)


def _why(best: Option, exact: Option, ceiling: float | None) -> str:
    limit = "" if ceiling is None else f", and no hook can make it more than {ceiling:.2f}x as fast"
    return (
        f"A step takes {_ms(best.step_s)} instead of {_ms(exact.step_s)} with {BASELINE}: it is "
        f"{exact.step_s / best.step_s:.2f}x as fast{limit}. The error of the averaged gradient is {best.error:.2g}, "
    )


def _chosen_by(best: Option, fastest: Option) -> str:
    """Why the recommended hook won: it goes on with the error that `_why` ends with."""
    if best.step_s <= NEAR * fastest.step_s:
        return f"the smallest among the hooks within {NEAR - 1:.0%} of the fastest."
    return (
        f"the smallest of a tie: the {_ms(fastest.step_s)} of {fastest.hook}, the fastest, differ from it by less than "
        f"the uncertainty of {_margin(best, fastest):.0%}."
    )


def _why_none(options: Sequence[Option], exact: Option, ceiling: float | None) -> str:
    limit = "" if ceiling is None else f" Without communication it would be {ceiling:.2f}x as fast."
    faster = [option for option in options if _is_faster(option, exact)]
    unsure = [option for option in faster if not option.excluded]
    if unsure:
        best = min(unsure, key=lambda option: option.step_s)
        return (
            f"The median step under {best.hook} is {exact.step_s / best.step_s:.2f}x as fast as under {BASELINE}, but "
            f"the steps differ too much from each other to be sure. Measure again on a quiet machine.{limit}"
        )
    if not faster:
        return f"No hook makes a step at least {PAYS:.2f}x as fast as {BASELINE} does.{limit}"
    return f"Every hook that makes a step at least {PAYS:.2f}x as fast is excluded: {_excluded(faster)}.{limit}"


def _passed_over(faster: Sequence[Option], best: Option) -> str:
    """The hooks that would be recommended if they were admissible."""
    passed = [option for option in faster if option.excluded and option.step_s < best.step_s]
    return f" Faster, but excluded: {_excluded(passed)}." if passed else ""


def _excluded(options: Sequence[Option]) -> str:
    return ", ".join(f"{option.hook} ({option.excluded})" for option in options)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
