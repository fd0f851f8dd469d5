import io

import pytest

from gradwire.tools.records import progress as module
from gradwire.tools.records.progress import Estimate, bar, progress


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_time_left_goes_by_what_was_done_since_the_first_report():
    estimate = Estimate()
    assert estimate.left_s(0.0, 0.0) is None  # still starting: that time does not count
    assert estimate.left_s(0.1, 5.0) is None
    assert estimate.left_s(0.4, 8.0) == pytest.approx(6.0)


def test_the_bar():
    assert (
        bar(0.25, "training fp16", 75, title="demo", width=60)
        == "demo  █████░░░░░░░░░░░░░░░░   25%  1:15 left  training fp16"
    )
    assert bar(0.5, "x", None, title="demo", width=30, ascii_only=True) == "demo  #######-------   50%  x"


@pytest.mark.parametrize("width", range(5, 120))
def test_the_bar_never_fills_the_last_column(width):
    assert len(bar(1.0, "training fp16:accumulate=wire", 3600, title="demo", width=width)) < width


def test_a_terminal_gets_one_line_that_is_wiped_at_the_end():
    stream = Terminal()
    with progress(stream, "demo") as report:
        report(0.5, "training")
        report(0.6, "too soon to be drawn")
    text = stream.getvalue()
    assert "\n" not in text
    assert "50%" in text
    assert "60%" not in text
    assert "\x1b[32m" in text
    assert text.endswith(module.CLEAR)


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with progress(stream, "demo") as report:
        report(0.5, "training")
    assert "\x1b[3" not in stream.getvalue()
    assert "█" in stream.getvalue()


def test_a_terminal_without_the_characters_gets_ascii():
    stream = Terminal()
    stream.encoding = "ascii"
    with progress(stream, "demo") as report:
        report(0.5, "training")
    assert stream.getvalue().isascii()
    assert "#" in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_files_and_dumb_terminals_get_a_few_plain_lines(stream, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with progress(stream, "demo") as report:
        for percent in range(101):
            report(percent / 100, "training")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "demo: 0%, training"
    assert [line.split(",")[0] for line in lines] == [f"demo: {part}%" for part in (0, 1, 20, 40, 60, 80, 100)]
    assert "\x1b" not in stream.getvalue()
