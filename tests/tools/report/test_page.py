"""The page of the report, parsed: well-formed, offline, and with the numbers of the records."""

import sys
from html.parser import HTMLParser

import pytest

from gradwire.errors import GradwireError
from gradwire.report import advise, summarise, to_html
from gradwire.tools.records.records import NO_LINK
from gradwire.tools.report.charts import LLOYD_MAX, rate_distortion
from gradwire.tools.report.svg import free_place, ladder, steps
from gradwire.tools.report.tables import COLUMNS
from gradwire.tools.report.write import check_page

from .kit import BITS, ORIGIN, run, runs

VOID = {"meta", "link", "input"}


class Page(HTMLParser):
    """Elements with attributes and text. It fails on a tag that is not closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "attrs": dict(attributes), "text": "", "within": [each["tag"] for each in self._open]}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]


@pytest.fixture(scope="module")
def summary():
    return summarise(runs(ranks=(2, 4), repeats=2))


@pytest.fixture(scope="module")
def page(summary):
    return Page(to_html(summary))


def test_every_number_of_the_table_is_that_of_the_records(page, summary):
    values = [float(element["attrs"]["value"]) for element in page.all("data")]
    expected = [column.value(row, group) for group in summary.groups for row in group.rows for column in COLUMNS]
    assert values == expected
    shown = [element["text"] for element in page.all("data")]
    assert shown == [column.text(row, group) for group in summary.groups for row in group.rows for column in COLUMNS]


def test_tables_have_captions_and_header_scopes(page, summary):
    assert [element["text"] for element in page.all("caption")] == [group.name for group in summary.groups]
    assert {element["attrs"].get("scope") for element in page.all("th")} == {"col", "row"}
    names = [element["text"] for element in page.all("th") if element["attrs"]["scope"] == "row"]
    assert names == [row.hook + " †" * (row.hook == "noop") for group in summary.groups for row in group.rows]


def test_every_chart_has_a_title_and_a_description(page):
    charts = {element["attrs"]["id"]: element for element in page.all("svg")}
    each = {f"{name}-{index}" for name in ("headroom", "stack") for index in range(6)}
    assert set(charts) == each | {f"{name}-{ranks}" for name in ("speed-up", "error", "loss") for ranks in (2, 4)}
    ids = {element["attrs"]["id"] for element in page.elements if "id" in element["attrs"]}
    for element in charts.values():
        assert element["attrs"]["role"] == "img"
        assert set(element["attrs"]["aria-labelledby"].split()) <= ids


def test_descriptions_and_tips_hold_the_numbers_of_the_charts(page, summary):
    described = {element["attrs"]["id"]: element["text"] for element in page.all("desc")}
    tips = {element["text"] for element in page.all("title")}
    for index, group in enumerate(summary.groups):
        for row in group.rows:
            for part in ("compute", "encode", "wire", "decode"):
                took = f"{1e3 * getattr(row.split, f'{part}_s'):.1f} ms"
                assert f"{part} {took}" in described[f"stack-{index}-desc"]
                assert f"{row.hook}: {part} {took}" in tips
            if row.hook != "exact":
                assert f"{row.hook} {group.speed_up(row):.2f}x" in described[f"speed-up-{group.ranks}-desc"]
            last = f"{row.losses[-1]:.3f}"
            assert f"{row.hook} from {row.losses[0]:.3f} to {last}" in described[f"loss-{group.ranks}-desc"]


def test_recommendation_and_headroom_are_in_words(page, summary):
    heads = [element["text"] for element in page.all("h2")]
    texts = [element["text"] for element in page.all("p")]
    for group in summary.groups:
        assert advise(group).title in heads
        assert advise(group).reason in texts
        assert any(text.startswith(f"At most {group.ceiling:.2f}x") for text in texts)
    assert 'gradwire.register(ddp_model, "int4")' in [element["text"] for element in page.all("code")]


def test_the_page_makes_no_requests(page):
    assert not page.all("script")
    links = [element["attrs"][key] for element in page.elements for key in ("src", "href") if key in element["attrs"]]
    assert sorted(links) == ["#table", "data:,"]
    (style,) = (element["text"] for element in page.all("style"))
    assert "url(" not in style
    assert "@import" not in style


def test_groups_can_be_chosen_if_there_are_several(page, summary):
    assert len(page.all("input")) == len(summary.groups)
    assert sum("checked" in element["attrs"] for element in page.all("input")) == 1
    single = Page(to_html(summarise(runs(links=(NO_LINK,)))))
    assert not single.all("input")
    assert "One link was measured" in "".join(element["text"] for element in single.all("p"))


def test_text_from_records_is_escaped(page):
    assert ORIGIN.machine in page.all("footer")[0]["text"]
    assert not page.all("processor")


@pytest.mark.parametrize(
    "members",
    [
        [run("int8")],
        [run("exact"), run("noop")],
        [run("exact"), run("int8", gradient_error=0.0)],
        [run("exact"), run("int8"), run("int8", link="1gbit")],
        [run("exact"), run("bf16"), run("int8", link="1gbit")],
    ],
    ids=["no baselines", "only baselines", "no error", "no baseline on one link", "a hook without a baseline"],
)
def test_a_page_with_missing_runs_is_complete(members):
    page = Page(to_html(summarise(members)))
    assert page.all("table")
    assert len(page.all("data")) >= len(members) * (len(COLUMNS) - 1)


def test_names_of_many_hooks_have_different_places():
    page = Page(to_html(summarise([run(hook) for hook in BITS])))
    named = [element for element in page.all("text") if element["text"] in BITS]
    places = [(element["attrs"]["x"], element["attrs"]["y"]) for element in named]
    assert len(set(places)) >= len(BITS) * 3


def test_limits_agree_with_theory():
    assert rate_distortion(4) == 2**-8
    assert all(rate_distortion(bits) < value < 1.5 * 2 * rate_distortion(bits) for bits, value in LLOYD_MAX.items())


def test_ticks_are_round_numbers_within_the_range():
    assert steps(90) == [0, 20, 40, 60, 80]
    assert steps(0.9) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert ladder(0.8, 6) == [1, 2, 5]


def test_labels_of_many_points_do_not_overlap():
    taken = []
    for _ in range(8):
        free_place(200, 130, "powersgd", taken, (40, 0, 400, 272))
    for index, a in enumerate(taken):
        for b in taken[:index]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_without_jinja2_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(GradwireError, match=r"a page needs jinja2.*pip install 'gradwire\[cli\]'"):
        to_html(summarise([run("exact")]))
    with pytest.raises(GradwireError, match="jinja2"):  # before a measurement, not after it
        check_page(tmp_path / "page.html")
