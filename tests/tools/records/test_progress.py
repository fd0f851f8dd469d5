import io
import re

import pytest

from gradwire.tools.records.progress import Estimate, progress

ERASED = "\x1b[1A\x1b[2K"
"""Up to the line of the bar, which is cleared."""


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def test_time_left_goes_by_what_was_done_since_the_first_report():
    estimate = Estimate()
    assert estimate.left_s(0.0, 0.0) is None  # still starting: that time does not count
    assert estimate.left_s(0.1, 5.0) is None
    assert estimate.left_s(0.4, 8.0) == pytest.approx(6.0)


def shown_on(stream):
    with progress(stream, "demo") as report:
        report(0.5, "training [int8]")
    return stream.getvalue()


def test_a_terminal_gets_one_line_that_is_erased_at_the_end():
    text = shown_on(Terminal())
    assert "50%" in text
    assert "demo" in text
    assert "training [int8]" in text
    assert text.count("\n") == 1
    assert text.endswith(ERASED)


def test_no_color_is_respected(monkeypatch):
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]m|\x1b\[9[0-9]m")
    assert colour.search(shown_on(Terminal()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(shown_on(Terminal()))


def test_a_terminal_without_the_characters_gets_ascii():
    stream = Terminal()
    stream.encoding = "ascii"
    assert shown_on(stream).isascii()


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert shown_on(Terminal()) == "demo: 50%, training [int8]\n"


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
