"""Step 2: which hook to take on a link, or none, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.tools.records.records import PLAIN
from gradwire.tools.records.table import ms
from gradwire.tools.report.summary import Group, Row

BOUND_BY_NETWORK = 1.10
"""Below this ceiling the network is not what holds training back."""

SAME_LOSS = 0.02
"""Final losses closer than this count as equal: another seed moves them by more."""

FEW_STEPS = 8
"""Fewer timed steps than this say nothing about speed."""

NOISE = 0.97
"""Below this one noop, which does less than exact, was slower: the machine had other work."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do in one group."""

    hook: str | None
    """To register; None: do not compress."""
    title: str
    reason: str

    @property
    def code(self) -> str:
        """The line to add to a program; empty if none."""
        return f'gradwire.register(ddp_model, "{self.hook}")' if self.hook else ""


def advise(group: Group) -> Advice:
    """From the measured rows alone: nothing is predicted here."""
    exact, noop = group.exact, group.noop
    if exact is None or noop is None:
        missing = " and ".join(hook for hook in ("exact", "noop") if group.row(hook) is None)
        return Advice(None, "No recommendation", f"The records hold no run of {missing} to compare with.")
    if len(exact.record.step_s) < FEW_STEPS:
        return Advice(None, "No recommendation", f"{len(exact.record.step_s)} timed steps say too little.")
    ceiling = exact.record.median_s / noop.record.median_s
    room = f"{ms(exact.record.median_s)} ms a step with the exact exchange, {ms(noop.record.median_s)} ms with none"
    if ceiling < NOISE:
        return Advice(None, "Too noisy to say", f"Sending nothing was slower than sending all ({room}): measure again.")
    if ceiling < BOUND_BY_NETWORK:
        return Advice(
            None, "Do not compress", f"Not network-bound: {room}, so no hook can gain more than {_gain(ceiling)}."
        )
    faster = [row for row in candidates(group) if _clearly_faster(row, exact)]
    fit = [row for row in faster if row.record.loss <= exact.record.loss + SAME_LOSS]
    if not fit:
        return Advice(None, "Do not compress", f"{_why_none(faster, exact)} Network-bound, though: {room}.")
    best = _choose(fit)
    return Advice(best.hook, f"Use {best.hook}", _why(best, exact, ceiling, _not_taken(faster, fit, best)))


def candidates(group: Group) -> list[Row]:
    """Hooks that average, keep their promises and are not the baseline."""
    rows = [row for row in group.rows if row.hook not in ("exact", PLAIN) and row.record.averages]
    return [row for row in rows if row.record.kept_promises and row.record.identical]


def _clearly_faster(row: Row, than: Row) -> bool:
    """The middle half of its steps lies below the middle half of the other's."""
    return row.record.quartiles_s[1] < than.record.quartiles_s[0]


def _choose(fit: Sequence[Row]) -> Row:
    """Of those that are as fast as the fastest, within the spread, the most exact."""
    fastest = min(fit, key=lambda row: row.record.median_s)
    equals = [row for row in fit if not _clearly_faster(fastest, row)]
    return min(equals, key=lambda row: row.record.gradient_error)


def _why(best: Row, exact: Row, ceiling: float, rest: str) -> str:
    apart = best.record.loss - exact.record.loss
    return (
        f"{ms(best.record.median_s)} ms a step against {ms(exact.record.median_s)} ms for exact: "
        f"{exact.record.median_s / best.record.median_s:.2f}x, where no hook can pass {ceiling:.2f}x. Gradient error "
        f"{best.record.gradient_error:.1e}, loss {apart:+.3f} nats against exact. Of the hooks as fast as the fastest, "
        f"within the spread, it is the most exact.{rest}"
    )


def _why_none(faster: Sequence[Row], exact: Row) -> str:
    if not faster:
        return "No hook is faster than exact by more than the spread of the step times."
    return f"What is faster than exact ({', '.join(row.hook for row in faster)}) ends with a higher loss."


def _not_taken(faster: Sequence[Row], fit: Sequence[Row], best: Row) -> str:
    """Hooks that would win but for their loss."""
    worse = [row.hook for row in faster if row not in fit and row.record.median_s < best.record.median_s]
    return f" Faster, but with a loss more than {SAME_LOSS} above exact: {', '.join(worse)}." if worse else ""


def _gain(ratio: float) -> str:
    return f"{max(ratio - 1, 0):.1%}"
