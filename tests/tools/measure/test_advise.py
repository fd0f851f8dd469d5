import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gradwire.auto.pilot import TURN_STEPS
from gradwire.errors import SpecError
from gradwire.tools.cli import main
from gradwire.tools.cli.advise import compare_command, to_text
from gradwire.tools.measure.advise import Advice, Row, advise
from gradwire.tools.measure.headroom import Headroom
from gradwire.tools.measure.survey import ROUNDS
from gradwire.tools.measure.uncertainty import MODEL_ERROR
from gradwire.tools.records.records import Split
from gradwire.tools.report.advice import runs_of
from gradwire.tools.report.page import advice_to_html

from ..cli.messages import is_short

BOUND = Headroom(with_s=(0.1,) * 8, without_s=(0.05,) * 8, ranks=2, link="1gbit", wanted_steps=16)
FREE = replace(BOUND, without_s=(0.095,) * 8)
SPLIT = Split(compute_s=0.05, encode_s=0.001, wire_s=0.02, decode_s=0.002, wait_s=0.01)


def row(hook, ms, error, sent=1e6):
    step_s = () if ms is None else tuple(ms / 1e3 * factor for factor in (0.99, 1, 1.01))
    measured_s, split = (None, None) if ms is None else (ms / 1e3, SPLIT)
    return Row(
        hook=hook,
        predicted_s=(ms or 50) / 1e3,
        measured_s=measured_s,
        error=error,
        sent_bytes=sent,
        step_s=step_s,
        split=split,
    )


ROWS = (
    row("exact", 100, 3e-8, 10e6),
    row("bf16", 75, 1e-3, 5e6),
    row("int8", 60, 5e-3, 2.6e6),
    row("int6", 59, 1.5e-2, 2e6),
    row("int4", None, 7e-2, 1.3e6),
)


def advice(rows=ROWS, headroom=BOUND, max_error=0.02, **model):
    return Advice(headroom=headroom, rows=tuple(rows), max_error=max_error, params=2_500_000, **model)


def test_of_the_fastest_the_most_exact_is_picked():
    assert advice().pick == "int8"  # int6 is faster by 2%, which is not worth three times the error
    assert advice([*ROWS[:2], row("int8", 62, 5e-3), ROWS[3]]).pick == "int6"


def test_nothing_is_picked_where_the_network_does_not_hold_back():
    found = advice(headroom=FREE)
    assert (found.pick, found.compress, found.line) == ("exact", False, "# no hook: DDP as it is")
    assert found.reason() == (
        "Do not compress. The training is not network-bound. A step takes 100.0 ms with exact and would take 95.0 ms "
        "without communication: communication takes 5.0% of it, and below 10% no hook pays."
    )


def test_a_gain_below_a_tenth_is_not_worth_it():
    found = advice([ROWS[0], row("bf16", 92, 1e-3)])
    assert found.pick == "exact"
    assert found.reason() == (
        "Do not compress. No hook makes a step at least 1.10x as fast as exact does. Without communication it would be "
        "2.00x as fast."
    )
    assert advice([ROWS[0], row("bf16", 90, 1e-3)]).pick == "bf16"


def test_a_hook_with_too_large_an_error_is_never_picked():
    sloppy = row("sign", 20, 0.5)
    assert advice([*ROWS, sloppy]).pick == "int8"
    assert advice([*ROWS, sloppy], max_error=0.6).pick == "sign"
    assert advice(max_error=2e-3).pick == "bf16"


def test_exact_needs_no_measuring_where_it_is_alone_within_the_error():
    alone = [row("exact", None, 3e-8), row("bf16", None, 1e-3)]
    assert advice(alone, max_error=1e-6).pick == "exact"


def test_the_reason_has_the_figures_and_the_line_is_there_to_paste():
    found = advice()
    assert found.reason() == (
        "Use int8. A step takes 60.0 ms instead of 100.0 ms with exact: it is 1.67x as fast, and no hook can make it "
        "more than 2.00x as fast. The error of the averaged gradient is 0.005, the smallest among the hooks within 3% "
        "of the fastest."
    )
    assert found.line == 'gradwire.register(ddp_model, "int8")'


def test_what_smaller_buckets_alone_do_is_told():
    """All hooks are measured with them, `exact` too; DDP as it is without."""
    told, faster = (
        "100.0 ms, because its buckets are larger than gradwire's buckets of 4.0 MiB.",
        row("exact", 85, 3e-8),
    )
    assert told in advice([faster, *ROWS[1:]], bucket_mb=4.0).reason()
    assert told in advice([faster, row("bf16", 84, 1e-3)], bucket_mb=4.0).reason()
    assert "Plain DDP" not in advice([row("exact", 95, 3e-8), *ROWS[1:]], bucket_mb=4.0).reason()
    assert "Plain DDP" not in advice([faster, *ROWS[1:]]).reason()  # the user's own buckets: it was chance


def test_text_has_the_measured_first_and_marks_the_pick():
    text = to_text(advice())
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("hook "))
    assert [line.split()[0] for line in lines[first + 1 : first + 6]] == ["int6", "int8", "bf16", "exact", "int4"]
    assert lines[first + 2] == ("int8      60.0 ±10%         60.0     1.67x     2.60  5.0e-03  <- use this")
    assert lines[first + 5].split()[:7] == ["int4", "50.0", "±10%", "-", "-", "1.30", "7.0e-02"]
    assert lines[first + 5].endswith("  faster, if it does not hurt")
    assert lines[-1] == '    gradwire.register(ddp_model, "int8")'
    assert max(map(len, lines)) <= 100
    assert "<-" not in to_text(advice(headroom=FREE))


def test_text_json_and_page_say_how_sure_a_prediction_is():
    found = advice([*ROWS[:-1], replace(ROWS[-1], uncertainty=0.234)])
    assert "int4      50.0 ±23%" in to_text(found)
    assert [row["uncertainty"] for row in found.as_dict()["hooks"]] == [MODEL_ERROR] * 4 + [0.234]
    assert "before anything was measured: int4 50.0 ±23%, int6 59.0 ±10%" in advice_to_html(found)


def test_of_a_tie_the_more_exact_hook_is_picked_and_the_reason_says_so():
    """The steps of both vary by a third: 4% between their medians says nothing."""
    noisy = [
        replace(row(hook, ms, error), step_s=tuple(ms / 1e3 * factor for factor in (0.7, 0.85, 1.0, 1.15, 1.3)))
        for hook, ms, error in (("int8", 62, 5e-3), ("int6", 59, 1.5e-2))
    ]
    found = advice([*ROWS[:2], *noisy])
    assert found.pick == "int8"
    assert "the smallest of a tie: the 59.0 ms of int6" in found.reason()


def test_a_faster_hook_above_the_error_is_named_with_the_command_that_compares_it():
    found = advice()
    assert [row.hook for row in found.promising()] == ["int4"]
    assert [row.hook for row in advice([*ROWS[:-1], replace(ROWS[-1], predicted_s=0.059)]).promising()] == []
    assert advice(headroom=FREE).promising() == []
    given = {
        "compare_steps": 300,
        "link": "1gbit",
        "nproc": 2,
        "module": False,
        "script": "a b.py",
        "args": ["--lr", "1"],
    }
    assert compare_command(found, Namespace(**given)) == (
        "gradwire compare --hooks exact int8 int4 --steps 300 --link 1gbit --nproc 2 'a b.py' --lr 1"
    )
    alone = {**given, "link": None, "nproc": None}
    assert compare_command(found, Namespace(**alone)).endswith("--steps 300 -- 'a b.py' --lr 1")
    assert compare_command(found, Namespace(**{**alone, "script": None, "args": []})).endswith("int4 --steps 300")
    assert compare_command(advice(headroom=FREE), Namespace(**given)) is None


def test_hooks_to_compare_are_those_between_the_pick_and_the_coarsest():
    """As measured on an emulated link of 100 Mbit/s, where the three fastest all did harm."""
    figures = [("exact", 61.3, 2.8e-8), ("int8", 20.2, 5.6e-3), ("int6", 17.0, 1.7e-2), ("fp8", 20.3, 2.1e-2)]
    figures += [("int5", 16.5, 3.5e-2), ("int4", 13.5, 7e-2), ("int3", 13.1, 0.15), ("powersgd", 11.1, 0.39)]
    found = advice([row(*given) for given in [*figures, ("sign", 8.4, 0.53), ("topk", 8.3, 0.93)]])
    assert [row.hook for row in found.promising()] == ["int4", "powersgd", "sign"]
    assert [row.hook for row in found.promising(most=1)] == ["int4"]


def test_rows_come_back_from_json():
    content = json.loads(json.dumps(advice().as_dict()))
    assert tuple(map(Row.from_dict, content["hooks"])) == ROWS
    assert (content["pick"], content["compress"], content["params"]) == ("int8", True, 2_500_000)
    assert content["headroom"]["ceiling"] == pytest.approx(2)


class Page(HTMLParser):
    """The text of every element, by tag."""

    def __init__(self, text):
        super().__init__()
        self.text, self.charts, self._open = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._open.append(tag)
        self.text.setdefault(tag, []).append("")
        if tag == "svg":
            self.charts.append(dict(attributes)["id"])

    def handle_endtag(self, tag):
        while self._open.pop() != tag:
            pass

    def handle_data(self, data):
        for tag in set(self._open):
            self.text[tag][-1] += data


def test_the_page_has_the_advice_the_headroom_and_no_loss():
    found = advice()
    html = advice_to_html(found)
    page = Page(html)
    assert "Use int8" in page.text["h2"]
    assert found.reason() == f"Use int8. {page.text['p'][2]}"
    assert page.text["code"] == [found.line]
    assert "At most 2.00x: 100.0 ms a step with the exact exchange, 50.0 ms with none." in page.text["p"]
    assert page.charts == ["headroom-0", "stack-0", "speed-up-2", "error-2"]
    assert (
        "None: advise does not see the script's loss. Train under the hook for a while and compare." in page.text["p"]
    )
    assert "final loss" not in page.text["th"]
    assert [name for name in page.text["th"] if name in dict.fromkeys(row.hook for row in ROWS)] == [
        "exact", "bf16", "int8", "int6",
    ]  # fmt: skip
    assert "nan" not in html.lower()


def test_the_page_follows_the_advice_not_the_times():
    page = Page(advice_to_html(advice(headroom=FREE)))
    assert "Do not compress" in page.text["h2"]
    assert "code" not in page.text


def test_a_page_with_exact_alone_has_the_times_of_the_headroom():
    found = advice([row("exact", None, 3e-8), row("bf16", None, 1e-3)], max_error=1e-6)
    (run,) = runs_of(found)
    assert (run.cell.hook, run.record.step_s, run.split) == ("exact", BOUND.with_s, None)
    assert "Do not compress" in Page(advice_to_html(found)).text["h2"]


FED = "int8:feedback=true"
"""After such a step another hook applies the pending residuals: neither counts."""


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_short_run_on_the_built_in_model(tmp_path):
    page = tmp_path / "report.html"
    words = ("advise", "--link", "200mbit", "--steps", "8", "--hooks", FED, "int4", "--json", "--report", str(page))
    command = (sys.executable, "-m", "gradwire", *words)
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    rows = {row["hook"]: row for row in content["hooks"]}
    assert list(rows) == ["exact", "bf16", FED, "int4"]
    assert content["headroom"]["link"] == "200mbit"
    assert content["headroom"]["is_network_bound"]  # 10 MB at 200 Mbit/s are 0.4 s
    assert content["pick"] in ("exact", "bf16", FED)  # whichever is fast on a busy machine, but not int4: its error
    assert [hook for hook, row in rows.items() if row["measured_s"] is None] == ["int4"]
    assert {len(row["step_s"]) for hook, row in rows.items() if hook != "int4"} == {ROUNDS * TURN_STEPS}
    assert rows["exact"]["sent_bytes"] == 4 * content["params"]
    assert rows["exact"]["error"] < 1e-6 < rows["bf16"]["error"] < rows[FED]["error"] < 0.02 < rows["int4"]["error"]
    split = rows["exact"]["split"]
    assert split["compute_s"] + split["wait_s"] == pytest.approx(rows["exact"]["measured_s"])
    assert split["wire_s"] > 0.35
    assert split["wait_s"] > 0
    assert rows[FED]["split"]["encode_s"] > 0
    assert content["report"] == str(page)
    title = "Do not compress" if content["pick"] == "exact" else f"Use {content['pick']}"
    assert title in Page(page.read_text()).text["h2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-error", "0"], "argument --max-error: must be above 0 and finite, got '0'"),
        (["--max-error", "-1"], "argument --max-error: must be above 0 and finite, got '-1'"),
        (["--max-error", "nan"], "argument --max-error: must be above 0 and finite, got 'nan'"),
        (["--max-error", "inf"], "argument --max-error: must be above 0 and finite, got 'inf'"),
        (["--max-error", "low"], "argument --max-error: must be above 0 and finite, got 'low'"),
        (["--nproc", "1"], "nproc is 1: there is no communication to measure; take --nproc 2 or more"),
        (["--nproc", "100000"], "the number of ranks must be between 1 and"),
        (["--hooks", "int9000"], "unknown hook 'int9000'"),
        (["--hooks", "noop"], "noop does not average, so it cannot be a candidate"),
        (["--steps", "7"], "steps must be at least 8, got 7"),
        (["--link", "fast"], "link 'fast'"),
        (["--report", "/"], "cannot write /: it is a folder; name a file in it"),
        (["--report", "/nowhere/at/all.html"], "there is no folder /nowhere/at"),
        (["nowhere.py"], "nowhere.py"),
    ],
)
def test_bad_input_has_a_short_message_and_exit_code_2(capsys, argv, message):
    assert main(["advise", *argv]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert is_short(printed.err)
    assert printed.out == ""


def test_bad_input_from_python():
    with pytest.raises(SpecError, match="max_error must be above 0"):
        advise(max_error=0.0)
