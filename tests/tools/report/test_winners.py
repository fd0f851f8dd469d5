"""The page of `gradwire simulate`: its cells name the recommended hooks, not by colour alone."""

import re
from html.parser import HTMLParser

import pytest

from gradwire.advisor import Link
from gradwire.tools.measure.simulate import Scene, picks
from gradwire.tools.report.winners import limit_text, to_html

from .forecasts import LIMITS, SCENE, forecast, forecasts


class Page(HTMLParser):
    """Tables as rows of (tag, class, text, values), and every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.open = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(
                {"tag": tag, "class": attrs.get("class"), "text": "", "scope": attrs.get("scope")}
            )
        elif tag == "data":
            self.tables[-1][-1][-1]["value"] = float(attrs["value"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1]["text"] += f"{data} "


@pytest.fixture(scope="module")
def page():
    return Page(to_html(forecasts(), SCENE, LIMITS))


@pytest.mark.parametrize("index", range(len(LIMITS)))
def test_cells_name_the_recommended_hook_and_its_speed_up(page, index):
    head, *rows = page.tables[index]
    assert [cell["text"].strip() for cell in head] == ["link", *(f"{count} ranks" for count in SCENE.ranks)]
    assert [row[0]["text"].strip() for row in rows] == ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
    for row, expected in zip(rows, picks(forecasts(), SCENE, LIMITS[index]), strict=True):
        assert [cell["text"].split() for cell in row[1:]] == [[p.hook, f"{p.speed_up:.2f}x"] for p in expected]
        assert [cell["value"] for cell in row[1:]] == [pick.speed_up for pick in expected]


def test_every_hook_has_its_own_colour(page):
    cells = [cell for table in page.tables[: len(LIMITS)] for row in table[1:] for cell in row[1:]]
    pairs = {(cell["text"].split()[0], cell["class"]) for cell in cells}
    assert len(pairs) == len({hook for hook, _ in pairs}) == len({class_ for _, class_ in pairs}) > 3


def test_headers_have_scopes_and_every_predicted_time_is_in_the_tables(page):
    tables = page.tables[len(LIMITS) :]
    assert len(tables) == len(SCENE.links)
    for at, (head, *rows) in enumerate(tables):
        assert {cell["scope"] for cell in head} == {"col"}
        assert {row[0]["scope"] for row in rows} == {"row"}
        for row, each in zip(rows, forecasts(), strict=True):
            assert row[0]["text"].split()[0] == each.hook
            assert float(row[1]["text"]) == pytest.approx(each.error, rel=0.05)
            assert [cell["value"] for cell in row[2:]] == [found.step_s for found in each.predictions[at]]


def test_the_legend_counts_the_cells():
    text = to_html(forecasts(), SCENE, [0.02])
    won = [pick.hook for row in picks(forecasts(), SCENE, 0.02) for pick in row]
    assert f"{len(won) - won.count('exact')} of {len(won)} cells gain from a hook" in text
    told = dict(re.findall(r"</i>(\w+)[^:<]*: (\d+)</li>", text))
    assert told == {hook: str(won.count(hook)) for hook in set(won)}


def test_the_page_makes_no_requests(page):
    assert [attrs for _, attrs in page.tags if "src" in attrs] == []
    links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not any(tag == "script" for tag, _ in page.tags)


def test_one_limit_needs_no_choice_and_links_show_their_latency_if_they_differ():
    scene = Scene(ranks=(2,), links=(Link(1e8, 5e-3), Link(1e8, 2e-5)), compute_s=0.1)
    text = to_html([forecast("exact", [[1.0], [1.0]])], scene, [0.02])
    assert "<fieldset" not in text
    assert "100 Mbit/s, 5 ms" in text
    assert "100 Mbit/s, 20 µs" in text
    assert [limit_text(limit) for limit in LIMITS] == ["error at most 0.02", "any error"]
