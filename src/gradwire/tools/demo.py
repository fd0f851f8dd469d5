"""The demo: does compression pay for the built-in GPT on a slow link? `advise` answers, and training shows it.

1. `advise` measures the headroom and the hooks, and picks one, or none.
2. The pick and a few others train the same model from the same seed, which gives loss curves for the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.tools.measure.advise import Advice, advise
from gradwire.tools.measure.alternate import ORDER
from gradwire.tools.measure.grid import Grid, run_group
from gradwire.tools.measure.headroom import MIN_ROUNDS
from gradwire.tools.records.records import NO_LINK, Run, Settings
from gradwire.tools.report.advised import finding
from gradwire.tools.report.page import to_html
from gradwire.tools.report.summary import Summary, summarise

TRAINED = ("bf16", "int4", "powersgd:rank=4")
"""Besides the baselines and the pick, unless hooks are named: one of each kind."""
FEWEST = MIN_ROUNDS * len(ORDER)
"""Steps that the headroom needs."""
ADVISING = 0.6
"""The part of the time that `advise` takes."""

Report = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Demo:
    """What came out."""

    advice: Advice
    runs: tuple[Run, ...]

    @property
    def summary(self) -> Summary:
        """Of the training."""
        return summarise(self.runs)

    def to_html(self) -> str:
        """The page: the recommendation is that of `advise`, the rest is from training."""
        run = self.runs[0]
        lead = (
            f"A GPT of {run.record.params / 1e6:.1f}M parameters learns the text of Python's standard library on "
            f"{run.cell.ranks} local ranks{link_words(run.cell.link)}. The recommendation and the headroom are those "
            f"of gradwire advise; all else is from {run.settings.steps} steps of training under each hook, from the "
            "same seed on the same batches. Speed-ups are against the hook exact, which sends what plain DDP sends."
        )
        return to_html(self.summary, finding(self.advice, lead))


def demo(hooks: Sequence[str], link: str, settings: Settings, report: Report = lambda part, doing: None) -> Demo:
    """Advise, choosing from `hooks` (none: all there are), then train. Bad input is refused before anything starts."""
    grid = _grid(hooks or TRAINED, link, settings)
    (place,) = grid.links
    found = advise(
        hooks=hooks,
        steps=max(FEWEST, settings.steps),
        link=None if place == NO_LINK else place,
        nproc=settings.nproc,
        report=lambda part, doing: report(ADVISING * part, doing),
    )
    assert found is not None, "the ranks are ours, so the first one tells"
    grid = _grid([found.pick, *(hooks or TRAINED)], link, settings)
    runs = run_group(grid, grid.cells(), settings, lambda part, doing: report(ADVISING + (1 - ADVISING) * part, doing))
    return Demo(found, tuple(runs))


def link_words(link: str) -> str:
    """To go on a sentence with."""
    return "" if link == NO_LINK else f", on an emulated link of {link}"


def _grid(hooks: Sequence[str], link: str, settings: Settings) -> Grid:
    return Grid(hooks=hooks, links=(link,), ranks=(settings.nproc,), settings=settings)
