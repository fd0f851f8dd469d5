"""The page of `gradwire simulate` in a real browser."""

import pytest

from gradwire.tools.measure.simulate import picks
from gradwire.tools.report.winners import to_html

from .browser import WIDTHS
from .forecasts import LIMITS, SCENE, forecasts

pytestmark = pytest.mark.browser
SHOWN = "[...document.querySelectorAll('.winners')].filter(e => e.offsetParent)"
CELLS = f"[...{SHOWN}[0].querySelectorAll('td')]"
RGB = """
(element, property) => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  canvas.fillStyle = getComputedStyle(element)[property];
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "winners.html"
    path.write_text(to_html(forecasts(), SCENE, LIMITS), encoding="utf-8")
    return path


def _luminance(rgb):
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in (c / 255 for c in rgb)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_nothing_is_logged_and_nothing_is_requested_but_the_file(browser, page):
    browser.open(page, 1200)
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_grid_scrolls_sideways_but_the_page_does_not(browser, page, width):
    browser.open(page, width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    left, right = browser.evaluate(f"(b => [b.left, b.right])({SHOWN}[0].parentElement.getBoundingClientRect())")
    assert 0 <= left < right <= width
    browser.evaluate(f"{SHOWN}[0].parentElement.scrollLeft = 1e6")
    head, last = browser.evaluate(
        f"[{SHOWN}[0].querySelector('tbody th'), {CELLS}[{len(SCENE.ranks) - 1}]].map(e => e.getBoundingClientRect())"
        ".map(b => [b.left, b.right])"
    )
    assert left <= head[0] < right  # the name of the link stays visible
    assert last[1] <= right + 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cells_have_enough_contrast_and_different_colours(browser, page, scheme):
    browser.open(page, 1200, scheme=scheme)
    browser.evaluate("document.querySelector('#choose-1').click()")
    found = browser.evaluate(
        f"{CELLS}.map(e => [e.querySelector('b').textContent, ({RGB})(e, 'color'), ({RGB})(e, 'backgroundColor')])"
    )
    assert all(_contrast(ink, ground) > 4.5 for _, ink, ground in found)
    grounds = {hook: tuple(ground) for hook, _, ground in found}
    assert len(set(grounds.values())) == len(grounds) > 2
    assert all((_luminance(ground) < 0.3) == (scheme == "dark") for ground in grounds.values())


def test_the_keyboard_changes_the_limit_and_the_cells_follow(browser, page):
    browser.open(page, 1200)
    for index in range(len(LIMITS)):
        seen = browser.evaluate(f"{CELLS}.map(e => e.innerText.split('\\n'))")
        expected = [pick for row in picks(forecasts(), SCENE, LIMITS[index]) for pick in row]
        assert seen == [[pick.hook, f"{pick.speed_up:.2f}x"] for pick in expected]
        for _ in range(2 if index == 0 else 0):
            browser.press("Tab", 9)
        browser.press("ArrowRight", 39)


def test_the_tables_of_all_numbers_open(browser, page):
    browser.open(page, 1200)
    browser.evaluate("document.querySelector('summary').click()")
    seen = browser.evaluate("document.querySelector('details tbody tr').innerText").split()
    assert seen[0] == "exact"
    assert float(seen[2]) == pytest.approx(1e3 * forecasts()[0].predictions[0][0].step_s, abs=0.06)
