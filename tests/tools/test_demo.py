from html import unescape
from pathlib import Path

import pytest

from gradwire.errors import SpecError
from gradwire.tools.cli.demo import to_json, to_text
from gradwire.tools.demo import Demo, demo
from gradwire.tools.records.records import Settings

from .measure.test_advise import FREE, advice
from .report.kit import run

HOOKS = ("exact", "noop", "int8", "bf16", "int4")
PAGE = Path("some.html")


def made(**changes):
    return Demo(advice(**changes), tuple(run(hook, "1gbit") for hook in HOOKS))


def test_the_text_goes_from_the_headroom_to_the_line_to_paste_and_the_page():
    text = to_text(made(), PAGE)
    title, headroom, hooks, training, answer, line, report = text.split("\n\n")
    assert title == ("Does compression pay? A GPT of 2.5M parameters on 2 local ranks, on an emulated link of 1gbit.")
    assert headroom.startswith("1. Headroom\n8 steps of each kind on 2 ranks")
    assert "Network-bound" in headroom
    assert hooks.startswith("2. Hooks")
    assert "<- use this" in hooks
    assert training.startswith("3. Training: 40 steps under each hook")
    assert answer.startswith("Use int8. ")
    assert line == '    gradwire.register(ddp_model, "int8")'
    assert report == "report: some.html"
    assert max(map(len, text.splitlines())) <= 100


def test_the_table_has_a_row_a_hook_with_its_loss_and_fits_a_terminal():
    rows = to_text(made(), PAGE).partition("3. Training")[2].splitlines()
    table = rows[1 : 2 + len(HOOKS)]
    assert [line.split()[0] for line in table] == ["hook", *HOOKS]
    assert table[0].endswith("final loss")
    assert table[1].endswith(f"{run('exact', '1gbit').record.loss:.3f}")
    assert max(map(len, table)) <= 80
    assert rows[2 + len(HOOKS)].startswith("† an upper limit")


def test_where_it_does_not_pay_text_and_page_say_so():
    found = made(headroom=FREE)
    assert "Do not compress. The training is not network-bound." in to_text(found, PAGE)
    page = found.to_html()
    assert "<h2>Do not compress</h2>" in page
    assert "<pre" not in page


def test_the_page_has_the_recommendation_of_advise_and_the_losses_of_training():
    page = made().to_html()
    assert "<h2>Use int8</h2>" in page  # of the runs alone it would be int4
    assert 'gradwire.register(ddp_model, "int8")' in unescape(page)
    assert "At most 2.00x: 100.0 ms a step with the exact exchange, 50.0 ms with none." in page
    assert 'id="loss-2"' in page
    assert "final loss" in page


def test_json_has_advice_records_and_the_path():
    assert '"pick": "int8"' in to_json(made(), PAGE)
    assert '"report": "some.html"' in to_json(made(), PAGE)


@pytest.mark.parametrize(
    ("hooks", "link", "message"),
    [(["int9000"], "1gbit", "unknown hook"), ([], "1 horse", "link '1 horse'"), (["plain"], "1gbit", "emulated link")],
)
def test_bad_input_is_refused_before_anything_starts(hooks, link, message):
    told = []
    with pytest.raises(SpecError, match=message):
        demo(hooks, link, Settings(), lambda *what: told.append(what))
    assert not told
