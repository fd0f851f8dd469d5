"""The demo: does compression pay for the built-in GPT on a slow link?

1. `advise` measures the headroom and the hooks, and recommends a hook, or none.
2. That hook and a few others train the same model from the same seed, which gives loss curves for the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.tools.launch.launch import Report
from gradwire.tools.measure.advise import Advice, advise
from gradwire.tools.measure.alternate import ORDER
from gradwire.tools.measure.grid import BenchGrid, run_group
from gradwire.tools.measure.headroom import MIN_ROUNDS
from gradwire.tools.records.records import NO_LINK, Run, Settings
from gradwire.tools.report.advice import finding
from gradwire.tools.report.page import to_html
from gradwire.tools.report.summary import Summary, summarise

TRAINED = ("bf16", "int4", "powersgd:rank=4")
"""Trained besides the baselines and the recommended hook, unless hooks are named: one of each kind."""
FEWEST = MIN_ROUNDS * len(ORDER)
"""The least number of steps for the headroom."""
ADVISING = 0.6
"""The part of the time that `advise` takes."""


@dataclass(frozen=True, slots=True)
class Demo:
    """The result."""

    advice: Advice
    runs: tuple[Run, ...]

    @property
    def summary(self) -> Summary:
        """The summary of the training."""
        return summarise(self.runs)

    def to_html(self) -> str:
        """The page. The recommendation is that of `advise`, the rest comes from the training."""
        run = self.runs[0]
        lead = (
            f"A GPT of {run.record.params / 1e6:.1f}M parameters learns the text of Python's standard library on "
            f"{run.cell.ranks} local ranks{link_text(run.cell.link)}. The recommendation and the headroom are those "
            f"of gradwire advise; everything else comes from {run.settings.steps} steps of training under each hook, "
            "with the same seed and batches. Speed-ups are relative to the hook exact, which sends what plain DDP does."
        )
        return to_html(self.summary, finding(self.advice, lead))


def demo(hooks: Sequence[str], link: str, settings: Settings, report: Report = lambda part, doing: None) -> Demo:
    """Recommend one of `hooks` (if there are none: of all), then train. SpecError before anything starts."""
    grid = _grid(hooks or TRAINED, link, settings)
    (place,) = grid.links
    advice = advise(
        hooks=hooks,
        steps=max(FEWEST, settings.steps),
        link=None if place == NO_LINK else place,
        nproc=settings.nproc,
        report=lambda part, doing: report(ADVISING * part, doing),
    )
    assert advice is not None, "this process starts the ranks, so it has the result"
    grid = _grid([advice.pick, *(hooks or TRAINED)], link, settings)
    runs = run_group(grid, grid.cells(), settings, lambda part, doing: report(ADVISING + (1 - ADVISING) * part, doing))
    return Demo(advice, tuple(runs))


def link_text(link: str) -> str:
    """The link, to be appended to a sentence."""
    return "" if link == NO_LINK else f", on an emulated link of {link}"


def _grid(hooks: Sequence[str], link: str, settings: Settings) -> BenchGrid:
    return BenchGrid(hooks=hooks, links=(link,), ranks=(settings.nproc,), settings=settings)
