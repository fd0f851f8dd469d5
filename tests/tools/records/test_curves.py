"""The file of runs of `gradwire compare`."""

import dataclasses
import math

import pytest

from gradwire.errors import SpecError
from gradwire.tools.records.curves import append_curves, check_conditions, is_curves, read_curves
from gradwire.tools.records.jsonl import RecordsError

from .curves import CONDITIONS, curve


def test_runs_come_back_and_the_last_one_of_a_name_and_seed_counts(tmp_path):
    path = tmp_path / "runs.jsonl"
    failed = curve("int4", 0, [2.5, math.nan], failed="rank 0 failed")
    again = curve("int4", 0, [2.5, 2.25], metric=((2, 1.5),), args=("--lr", "1"))
    append_curves(path, [curve("exact", 0, [2.5, 2.25])])
    append_curves(path, [failed])
    append_curves(path, [again])
    assert read_curves(path) == [curve("exact", 0, [2.5, 2.25]), again]
    assert is_curves(path)
    assert read_curves(tmp_path / "none") == []


def test_a_torn_line_is_dropped_and_overwritten(tmp_path):
    path = tmp_path / "runs.jsonl"
    append_curves(path, [curve("exact", 0, [2.5]), curve("int4", 0, [2.5])])
    path.write_bytes(path.read_bytes()[:-40])
    assert [each.name for each in read_curves(path)] == ["exact"]
    append_curves(path, [curve("int8", 0, [2.5])])
    assert [each.name for each in read_curves(path)] == ["exact", "int8"]


@pytest.mark.parametrize("content", ["import torch\n", '{"schema": 1}\n', '{"schema": 1, "kind": "compare"}\n', "text"])
def test_another_kind_of_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "train.py"
    path.write_text(content)
    with pytest.raises(RecordsError, match="line 1"):
        append_curves(path, [curve("exact", 0, [2.5])])
    assert path.read_text() == content


def test_runs_under_other_conditions_are_not_mixed(tmp_path):
    other = dataclasses.replace(CONDITIONS, steps=500, source="abc")
    check_conditions([curve("exact", 0, [1.0])], CONDITIONS, tmp_path)
    with pytest.raises(SpecError, match=r"source \( and abc\), steps \(200 and 500\); continue with the same ones"):
        check_conditions([curve("exact", 0, [1.0])], other, tmp_path)
