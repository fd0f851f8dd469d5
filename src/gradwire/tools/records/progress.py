"""One line that says how far a run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

REDRAW_S = 0.1
LINE_EVERY = 0.2
"""Plain lines come at every such part of the whole."""
BAR_WIDTH = 32
CLEAR = "\r\x1b[K"

Report = Callable[[float, str], None]


@contextmanager
def progress(stream: TextIO, title: str) -> Iterator[Report]:
    """A function to call with the part done (0 to 1) and what is under way, as often as one likes."""
    on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    shown = Bar(stream, title) if on_terminal else Lines(stream, title)
    try:
        yield shown.show
    finally:
        shown.close()


class Estimate:
    """Seconds left, from the part done and the time since the first part was."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left_s(self, part: float, now_s: float) -> float | None:
        """None until something is known."""
        if self._first is None and part > 0:
            self._first = (part, now_s)
        if self._first is None or part <= self._first[0]:
            return None
        return (1 - part) * (now_s - self._first[1]) / (part - self._first[0])


class Bar:
    """Redrawn in place, and wiped away at the end."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream, self._title = stream, title
        self._estimate = Estimate()
        self._drawn_s = float("-inf")
        self._colour = not os.environ.get("NO_COLOR")
        self._ascii = not _can_print(stream, "█░")

    def show(self, part: float, doing: str) -> None:
        """Draw, unless that has just been done."""
        now_s = time.monotonic()
        left_s = self._estimate.left_s(part, now_s)
        if now_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now_s
        line = bar(part, doing, left_s, title=self._title, width=_width(self._stream), ascii_only=self._ascii)
        self._write(CLEAR + (_coloured(line) if self._colour else line))

    def close(self) -> None:
        """Wipe it away."""
        self._write(CLEAR)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Lines:
    """A line now and then, for files and pipes."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream, self._title = stream, title
        self._estimate = Estimate()
        self._stage = -2

    def show(self, part: float, doing: str) -> None:
        """Write a line if enough has been done since the last one."""
        left_s = self._estimate.left_s(part, time.monotonic())
        stage = int(part / LINE_EVERY + 1e-9) if part > 0 else -1  # the first sign of life is a stage too
        if stage <= self._stage:
            return
        self._stage = stage
        left = f", about {left_s:.0f} s left" if left_s is not None and part < 1 else ""
        self._stream.write(f"{self._title}: {part:.0%}, {doing}{left}\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left to do."""


def bar(
    part: float, doing: str, left_s: float | None, *, title: str = "", width: int = 80, ascii_only: bool = False
) -> str:
    """One line of at most `width - 1` characters; the bar gives way first, then what is under way."""
    full, empty = "#-" if ascii_only else "█░"
    left = "" if left_s is None else f"{int(left_s + 0.5) // 60}:{int(left_s + 0.5) % 60:02d} left"
    texts = [text for text in (f"{part:4.0%}", left, doing) if text]
    room = width - 1 - len(title) - 2 - sum(len(text) + 2 for text in texts)
    cells = min(BAR_WIDTH, room)
    if cells < 5:
        return "  ".join([title, *texts])[: width - 1]
    filled = int(part * cells)
    return "  ".join([title, full * filled + empty * (cells - filled), *texts])


def _coloured(line: str) -> str:
    """The filled part in green."""
    filled = "".join(character for character in line if character in "█#")
    return line.replace(filled, f"\x1b[32m{filled}\x1b[0m", 1) if filled else line


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _can_print(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
