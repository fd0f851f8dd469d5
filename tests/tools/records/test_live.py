"""`gradwire watch`: files that grow, are torn, begin again, or are not there yet."""

import io
import json
import time

import pytest

from gradwire.metrics import JSONL, Record
from gradwire.tools.cli import main
from gradwire.tools.records import live
from gradwire.tools.records.jsonl import RecordsError
from gradwire.tools.records.live import Tail


def made(step, **values):
    return Record(step, time.time(), "int8", "int8: fastest" if step > 2 else "", {"step_s": 0.01 * step, **values})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_a_tail_reads_each_complete_line_once(path):
    tail, sink = Tail(path), JSONL(path)
    assert tail.read() == []
    sink.open()
    assert tail.read() == []
    sink.write(made(1))
    sink.write(made(2))
    line = json.dumps(made(3).as_dict()).encode()
    with path.open("ab") as file:
        file.write(line[:20])
    assert [record.step for record in tail.read()] == [1, 2]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(line[20:] + b'\n{"step": 4, "to\nnull\n')
    assert [record.step for record in tail.read()] == [3]
    path.unlink()
    assert tail.read() == []
    sink.write(made(7))
    assert [record.step for record in tail.read()] == [7]
    path.write_bytes(b"")
    assert tail.read() == []
    sink.write(made(8))
    assert [record.step for record in tail.read()] == [8]


def test_other_files_are_refused(path, capsys):
    path.write_text("import torch\n")
    with pytest.raises(RecordsError, match=r"no records of gradwire.metrics.JSONL"):
        Tail(path).read()
    path.write_text("")
    assert main(["watch", str(path), "--once"]) == 1
    assert "has no records yet" in capsys.readouterr().err


def test_once_prints_the_last_record_beside_the_median(path, capsys):
    for step in (1, 2, 6):
        JSONL(path).write(made(step, sent_bytes=2e6, error=float("nan")))
    assert main(["watch", str(path), "--once"]) == 0
    head, times, sent, reason = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "6:", "int8", "last", "median", "of", "3"]
    assert times.split() == ["step", "time", "60.0", "ms", "20.0", "ms"]
    assert sent.split() == ["sent", "per", "step", "2.00", "MB", "2.00", "MB"]
    assert reason == "auto chose int8: fastest"
    assert main(["watch", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["error"] is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_it_shows_what_comes_until_it_is_interrupted(path, out, monkeypatch):
    """First there is no file, then there are records, then Ctrl-C."""
    monkeypatch.setenv("TERM", "xterm")
    waits = iter([lambda: JSONL(path).write(made(1)), lambda: JSONL(path).write(made(3)), None])

    def sleep(seconds):
        act = next(waits)
        if act is None:
            raise KeyboardInterrupt
        act()

    monkeypatch.setattr(live.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        live.show(path, out)
    text = out.getvalue()
    if not out.isatty():
        assert text.splitlines() == [
            "step 1: int8, 10.0 ms per step",
            "step 3: int8, 30.0 ms per step (int8: fastest)",
        ]
        return
    for part in (
        "waiting for records in",
        "step 1: int8",
        "30.0 ms",
        "auto chose int8: fastest",
        "last record ",
    ):
        assert part in text
