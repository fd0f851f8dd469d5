"""Shows how far a run is: a bar by rich on a terminal, plain lines elsewhere and where rich is not installed."""

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LINE_EVERY = 0.2
"""A plain line is written whenever another such part is done."""

Report = Callable[[float, str], None]


@contextmanager
def progress(stream: TextIO, title: str) -> Iterator[Report]:
    """A function to call with the part that is done (0 to 1) and what is being done, as often as one likes."""
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    if is_terminal and importlib.util.find_spec("rich") is not None:
        with _bar(stream, title) as report:
            yield report
    else:
        yield Lines(stream, title).show


@contextmanager
def _bar(stream: TextIO, title: str) -> Iterator[Report]:
    """One line that is redrawn in place and erased at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}", markup=False),
    )
    with Progress(
        *columns, console=Console(file=stream), transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(title, total=1.0, doing="")
        yield lambda part, doing: bar.update(task, completed=part, doing=doing)


class Estimate:
    """Seconds left, from the part that is done and the time since the first report of progress."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left_s(self, part: float, now_s: float) -> float | None:
        """None until something is known."""
        if self._first is None and part > 0:
            self._first = (part, now_s)
        if self._first is None or part <= self._first[0]:
            return None
        return (1 - part) * (now_s - self._first[1]) / (part - self._first[0])


class Lines:
    """A line now and then, for files, pipes and terminals that a script writes to as well."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream, self._title = stream, title
        self._estimate = Estimate()
        self._stage = -2

    def show(self, part: float, doing: str) -> None:
        """Write a line if enough has been done since the last one."""
        left_s = self._estimate.left_s(part, time.monotonic())
        stage = int(part / LINE_EVERY + 1e-9) if part > 0 else -1  # the first progress is a stage of its own
        if stage <= self._stage:
            return
        self._stage = stage
        left = f", about {left_s:.0f} s left" if left_s is not None and part < 1 else ""
        self._stream.write(f"{self._title}: {part:.0%}, {doing}{left}\n")
        self._stream.flush()
