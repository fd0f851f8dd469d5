"""Records on disk: complete lines are read back, an incomplete last line is dropped, other files are refused."""

import json
import math
from io import StringIO

import pytest

from gradwire.tools.cli import main
from gradwire.tools.records.jsonl import RecordsError, append, read
from gradwire.tools.records.records import SCHEMA
from gradwire.tools.report.write import report

from ..report.kit import run, runs


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.jsonl"


def test_runs_come_back_from_the_file(path):
    made = runs(repeats=2)
    append(path, made[:5])
    append(path, made[5:])
    assert read(path).runs == made
    assert read(path).torn == []


def test_a_line_has_the_documented_fields(path):
    append(path, [run("int8", "1gbit", repeat=1, repeats=3)])
    line = json.loads(path.read_text())
    assert line["schema"] == SCHEMA
    assert line["cell"] == {"repeat": 1, "ranks": 2, "link": "1gbit", "hook": "int8"}
    assert (line["repeats"], line["settings"]["seed"], line["link_bits_per_s"]) == (3, 1, 1e9)
    assert set(line["origin"]) == {"machine", "system", "cores", "python", "torch", "gradwire"}
    low, high = line["step"]["spread_s"]
    assert low < line["step"]["median_s"] < high
    assert set(line["split"]) == {"compute_s", "encode_s", "wire_s", "decode_s", "wait_s"}
    assert line["split"]["compute_s"] + line["split"]["wait_s"] == pytest.approx(line["step"]["median_s"])
    assert len(line["losses"]) == line["settings"]["steps"]
    assert line["record"]["sent_bytes"] > 0


def test_the_later_of_two_runs_of_a_cell_counts(path):
    append(path, [run("int8", loss=1.0), run("int8", loss=2.0)])
    assert [each.record.loss for each in read(path).runs] == [2.0]


@pytest.mark.parametrize("keep", [1, 20, -2])
def test_an_incomplete_line_is_dropped_and_the_next_one_is_complete(path, keep):
    append(path, [run("exact"), run("noop")])
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second[:keep])
    held = read(path)
    assert [each.cell.hook for each in held.runs] == ["exact"]
    assert held.torn_text(path) == f"{path}: line 2 half-written: dropped"
    append(path, [run("int8")])
    assert [each.cell.hook for each in read(path).runs] == ["exact", "int8"]
    assert read(path).torn == []


def test_a_record_without_its_newline_is_kept(path):
    append(path, [run("exact")])
    path.write_text(path.read_text().rstrip("\n"))
    append(path, [run("noop")])
    assert [each.cell.hook for each in read(path).runs] == ["exact", "noop"]


FOREIGN = {
    "text": "some notes\nof mine\n",
    "no newline": "some notes",
    "json in lines": '{\n  "a": 1\n}',
    "torn json": '{"a": 1, "b"',
    "torn, with a newline": '{"schema": 1, "ce\n',
    "bytes": "\x00\x7f\ufffd",
}
"""Files that hold no records."""


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_a_file_without_records_is_not_changed(path, text, capsys):
    path.write_text(text)
    with pytest.raises(RecordsError, match="line 1 is not a record"):
        append(path, [run("exact")])
    assert main(["bench", "--out", str(path), "--resume"]) == 1
    assert "line 1 is not a record of `gradwire bench`: this is another kind of file" in capsys.readouterr().err
    assert path.read_text() == text


def test_the_error_has_the_number_of_the_wrong_line(path):
    append(path, [run("exact"), run("noop")])
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second[:40] + "\n" + second)
    with pytest.raises(RecordsError, match="line 2 is not a record"):
        append(path, [run("int8")])
    assert path.read_text() == first + second[:40] + "\n" + second


def test_a_folder_is_refused(path, capsys):
    assert main(["report", str(path.parent)]) == 2
    assert "it is a folder; name a file of records in it\n" in capsys.readouterr().err


WRONG = ("no step", "negative step", "step", "no params", "params", "bytes", "error", "loss")


def _changed(**changes):
    return json.dumps({**run("exact").as_dict(), **changes}) + "\n"


def _with(**changes):
    return _changed(record={**run("exact").record.as_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_changed(schema=99), "line 1 has schema 99, and this gradwire reads schema 1"),
        (_changed(origin={}), "says schema 1 but does not follow it: TypeError"),
        (_changed(link_bits_per_s=0), "link_bits_per_s must be above 0 or null, got 0"),
        (_with(step_s=[]), "step_s must hold times above 0"),
        (_with(step_s=[0.1, -0.1]), "step_s must hold times above 0"),
        (_with(step_s=[0.1, "fast"]), "step_s must be of type tuple[float, ...], got 'fast'"),
        (_with(params=0), "params must be above 0, got 0"),
        (_with(params=True), "params must be of type int, got True"),
        (_with(sent_bytes=math.inf), "sent_bytes must be 0 or more, got inf"),
        (_with(gradient_error=-1.0), "gradient_error must be 0 or more, got -1.0"),
        (_with(loss="low"), "loss must be of type float, got 'low'"),
        (json.dumps({"hook": "fp16"}), "line 1 is not a record of `gradwire bench`"),
        ("17\n", "line 1 is not a record of `gradwire bench`"),
        ("", "holds no record; `gradwire bench --out"),
        ('{"sche', "holds no record"),
        (None, "there is no file"),
        *((text, "line 1 is not a record of `gradwire bench`") for text in FOREIGN.values()),
    ],
    ids=["schema", "fields", "rate", *WRONG, "other json", "number", "empty", "only torn", "missing", *FOREIGN],
)
def test_files_without_valid_records_are_refused(path, text, message, capsys):
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path)]) == (2 if text is None else 1)
    with pytest.raises(RecordsError):
        report(path, None, kind="md", as_json=False, out=StringIO(), err=StringIO())
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_report_writes_a_page_and_prints_the_recommendation(path, capsys, monkeypatch):
    append(path, runs())
    with path.open("a") as file:
        file.write('{"schema": 1, "ce')
    monkeypatch.chdir(path.parent)
    assert main(["report", "records.jsonl"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "gradwire report: records.jsonl: line 25 half-written: dropped\n"
    assert "link 100mbit, 2 ranks: Use int4." in printed.out
    assert printed.out.endswith("report: report.html\n")
    assert (path.parent / "report.html").read_text().startswith("<!doctype html>")


def test_records_of_a_larger_machine_can_be_read(path, capsys):
    append(path, [run(hook, ranks=4096) for hook in ("exact", "noop", "int8")])
    assert {each.settings.nproc for each in read(path).runs} == {4096}
    assert main(["report", str(path), "--format", "md"]) == 0
    assert "4096 ranks" in capsys.readouterr().out


def test_report_as_markdown_goes_to_stdout_or_a_file(path, capsys):
    append(path, runs())
    assert main(["report", str(path), "--format", "md"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("## gradwire")
    target = path.parent / "report.md"
    assert main(["report", str(path), "--format", "md", "--out", str(target)]) == 0
    assert target.read_text() == text
    assert main(["report", str(path), "--format", "md", "--json"]) == 0
    content = json.loads(capsys.readouterr().out.partition("report.md\n")[2])
    assert content["report"] is None


def test_report_refuses_what_it_cannot_write(path, capsys):
    append(path, runs())
    assert main(["report", str(path), "--out", str(path.parent)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["report", str(path), "--json", "--out", "-"]) == 2
    assert "both write to stdout" in capsys.readouterr().err
