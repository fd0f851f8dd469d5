"""The page of the report in a real browser: layout, colours and keyboard."""

import pytest

from gradwire.report import summarise, to_html

from .browser import WIDTHS
from .kit import runs

pytestmark = pytest.mark.browser
LUMINANCE = """
(selector, property) => {
  const colour = getComputedStyle(document.querySelector(selector))[property];
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(summarise(runs(ranks=(2, 4), repeats=2))), encoding="utf-8")
    return path


def test_nothing_is_logged_and_nothing_is_requested_but_the_file(browser, page):
    browser.open(page, 1200)
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]


def test_requests_and_errors_of_a_page_are_noticed(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('no'); undefined_name()</script>")
    browser.open(bad, 1200)
    assert "http://127.0.0.1:9/x.png" in browser.requests()
    assert len(browser.complaints()) >= 2


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_charts_fit_at_every_width(browser, page, width):
    browser.open(page, width)
    boxes = browser.evaluate(
        "[...document.querySelectorAll('svg.chart')].map(e => e.getBoundingClientRect())"
        ".filter(b => b.width).map(b => [b.left, b.right, b.height])"
    )
    assert len(boxes) == 5
    assert all(0 <= left < right <= width and height > 50 for left, right, height in boxes)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_text_in_charts_is_large_enough_and_inside_the_page(browser, page):
    for width in WIDTHS.values():
        browser.open(page, width)
        sizes = browser.evaluate(
            "[...document.querySelectorAll('svg.chart')].filter(e => e.getBoundingClientRect().width).map(e => ["
            "e.getScreenCTM().a * parseFloat(getComputedStyle(e.querySelector('text')).fontSize),"
            "Math.min(...[...e.querySelectorAll('text')].map(t => t.getBoundingClientRect().left)),"
            "Math.max(...[...e.querySelectorAll('text')].map(t => t.getBoundingClientRect().right))])"
        )
        for size, left, right in sizes:
            assert size >= 9.5
            assert left >= 0
            assert right <= width


def test_colours_follow_the_colour_scheme(browser, page):
    for scheme, dark in (("light", False), ("dark", True)):
        browser.open(page, 360, scheme=scheme)
        background = browser.evaluate(f"({LUMINANCE})('body', 'backgroundColor')")
        for selector, colour in (("body", "color"), ("svg text", "fill"), (".hint", "color")):
            ink = browser.evaluate(f"({LUMINANCE})('{selector}', '{colour}')")
            assert (ink > background) == dark
            assert abs(ink - background) > 0.4


def test_the_keyboard_changes_the_group_and_focus_is_visible(browser, page):
    browser.open(page, 1200)
    shown = "[...document.querySelectorAll('caption')].filter(e => e.offsetParent).map(e => e.textContent)"
    assert browser.evaluate(shown) == ["no link limit, 2 ranks"]
    focused = []
    for _ in range(2):
        browser.press("Tab", 9)
        focused.append(browser.evaluate("document.activeElement.className || document.activeElement.id"))
    assert focused == ["skip", "choose-0"]
    assert browser.evaluate("getComputedStyle(document.querySelector('#choose-0 + span')).outlineStyle") == "solid"
    for _ in range(3):
        browser.press("ArrowRight", 39)
    assert browser.evaluate(shown) == ["no link limit, 4 ranks"]
    charts = "[...document.querySelectorAll('svg')].filter(e => e.getBoundingClientRect().width).map(e => e.id)"
    assert browser.evaluate(charts) == ["headroom-3", "stack-3", "speed-up-4", "error-4", "loss-4"]


def test_visible_numbers_are_those_of_the_records(browser, page):
    browser.open(page, 1200)
    (exact,) = [row for row in summarise(runs(ranks=(2, 4), repeats=2)).groups[0].rows if row.hook == "exact"]
    seen = browser.evaluate("document.querySelector('tbody tr').innerText").split()
    assert seen[0] == "exact"
    assert float(seen[1]) == pytest.approx(1e3 * exact.record.median_s, abs=0.06)
