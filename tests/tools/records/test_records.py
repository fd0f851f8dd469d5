"""Settings, records and runs, and what makes two runs comparable."""

import json
from dataclasses import asdict, replace

import pytest

from gradwire.errors import SpecError
from gradwire.tools.records.records import Origin, Record, Settings, conditions, differences
from gradwire.tools.workload import WorkloadSettings

from ..report.kit import BITS, run

HERE = Origin.here()


def test_one_step_has_no_spread():
    assert run("fp16", step_s=(0.05,)).record.quartiles_s == (0.05, 0.05)


def test_median_and_quartiles_of_the_step_time():
    record = run("fp16", step_s=(0.098, 0.100, 0.102, 0.104) * 2).record
    assert (record.median_s, *record.quartiles_s) == pytest.approx((0.101, 0.0995, 0.1025))


def test_records_and_settings_come_back_from_json():
    records = [run(hook).record for hook in BITS]
    assert [Record.from_dict(json.loads(json.dumps(record.as_dict()))) for record in records] == records
    settings = Settings(steps=7, limit_s=3.0)
    assert Settings.from_dict(json.loads(json.dumps(asdict(settings)))) == settings


def test_runs_that_differ_in_ranks_link_hook_or_repeat_are_comparable():
    first = run("exact")
    for other in (run("int8", "1gbit"), run("exact", ranks=4), run("exact", repeat=2, repeats=3)):
        assert differences(first.conditions, other.conditions) == []


def test_every_setting_and_the_origin_are_compared():
    settings = Settings(steps=40)
    ours = conditions(settings, HERE)
    assert ours == conditions(replace(settings, nproc=4), HERE)
    changes = {"steps": 9, "round_steps": 6, "limit_s": 1.0, "seed": 1, "bucket_mb": 1.0, "timeout_s": 1.0}
    for name, value in changes.items():
        expected = [f"{name} ({getattr(settings, name)} and {value})"]
        assert differences(ours, conditions(replace(settings, **{name: value}), HERE)) == expected
    wide = replace(settings, steps=9, workload=WorkloadSettings(width=512))
    assert differences(ours, conditions(wide, replace(HERE, cores=99))) == [
        "width (256 and 512)", "steps (40 and 9)", f"cores ({HERE.cores} and 99)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nproc": 0}, "nproc must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"round_steps": 0}, "round_steps must be at least 1"),
        ({"seed": -1}, "seed must be between 0"),
        ({"limit_s": 0.0}, "limit_s must be above 0"),
        ({"bucket_mb": 0.0}, "bucket_mb must be above 0"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        Settings(**settings)
