"""The documentation as it was built by `make docs`: links, and every page in a real browser without a network."""

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from .tools.report.browser import Browser

pytestmark = pytest.mark.browser
SITE = Path(__file__).parent.parent / "site"
PHONE = 360
SEARCH = """
(() => {
  document.querySelector("#__search").click();
  const input = document.querySelector("[data-md-component=search-query]");
  input.focus();
  input.value = "%s";
  input.dispatchEvent(new Event("input", {bubbles: true}));
  input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
})()
"""
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(e => e.getAttribute('href'))"
WIDE = """
[...document.querySelectorAll('article *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.closest('pre, .md-typeset__scrollwrap, .highlight');
}).slice(0, 3).map(e => e.outerHTML.slice(0, 200))
"""


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


@pytest.fixture(scope="module")
def pages():
    assert (SITE / "index.html").exists(), "run `make docs` first"
    return {path: Page(path) for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


def test_every_internal_link_has_a_target(pages):
    assert len(pages) > 50
    dead = []
    for path, page in pages.items():
        for link in page.links:
            address, anchor = urldefrag(unquote(link))
            if re.match(r"\w+:|//", address):
                continue
            target = (path.parent / address).resolve() if address else path
            known = not anchor or target not in pages or anchor in pages[target].anchors or anchor.startswith("__")
            if not target.exists() or not known:
                dead.append(f"{path.relative_to(SITE)}: {link}")
    assert dead == []


def test_every_page_fits_on_a_phone_and_needs_no_network(browser, pages):
    problems = []
    for path in pages:
        browser.open(path, PHONE)
        name = path.relative_to(SITE)
        problems += [f"{name}: {entry['params']}" for entry in browser.complaints()]
        problems += [f"{name}: requests {url}" for url in browser.requests() if not url.startswith(("file:", "data:"))]
        problems += [f"{name}: too wide: {part}" for part in browser.evaluate(WIDE)]
        if browser.evaluate("document.documentElement.scrollWidth") > PHONE:
            problems.append(f"{name}: scrolls sideways")
    assert problems == []


@pytest.mark.parametrize(("word", "page"), [("residual", "residuals.html"), ("two_level", "hooks.html")])
def test_the_search_works_without_a_server(browser, pages, word, page):
    browser.open(SITE / "index.html", 1200)
    browser.evaluate(SEARCH % word)
    until, found = time.monotonic() + 60, []
    while not found and time.monotonic() < until:
        time.sleep(0.1)
        found = browser.evaluate(FOUND)
    assert any(page in link for link in found)
    assert browser.complaints() == []
