import json
from dataclasses import asdict, replace

import pytest

from gradwire.errors import SpecError
from gradwire.tools.records.records import PLAIN, Record, Settings
from gradwire.tools.records.table import table


def record(hook, ms, sent_mb, error=1e-4, loss=2.5, **changes):
    made = Record(
        hook=hook,
        steps=80,
        step_s=tuple(value / 1e3 for value in ms),
        sent_bytes=sent_mb * 1e6,
        sent_is_counted=hook != PLAIN,
        gradient_error=error,
        loss=loss,
        averages=hook != "noop",
        identical=hook != "noop",
        verified="",
        kept_promises=True,
        params=2_500_000,
    )
    return replace(made, **changes)


RECORDS = [
    record(PLAIN, (98, 100, 102, 104) * 2, 10.0, error=2.8e-8),
    record("noop", (80, 81, 80, 80) * 2, 0.0, error=0.97, loss=2.6),
    record("fp16", (90, 91, 91, 92) * 2, 5.0, error=1.8e-4),
    record("bf16", (90, 95, 96, 97) * 2, 5.0, error=1.4e-3),
]
TABLE = """\
             step       step                sent    wire at
           median  quartiles  speed-up  per step   1 Gbit/s  gradient  final
hook           ms         ms  vs plain        MB  ms, calc.     error   loss
---------  ------  ---------  --------  --------  ---------  --------  -----
plain DDP   101.0    100-102     1.00x    ~10.00       80.0   2.8e-08  2.500
noop *       80.0      80-80     1.26x      0.00        0.0   9.7e-01  2.600
fp16         91.0      91-91     1.11x      5.00       40.0   1.8e-04  2.500
bf16         95.5      94-96     1.06x      5.00       40.0   1.4e-03  2.500
* upper limit, does not train together
~ by the ring formula; the others are counted"""


def test_the_table():
    assert table(RECORDS) == TABLE
    assert table(RECORDS, width=77) == TABLE


def test_a_little_narrower_and_the_columns_move_together():
    lines = table(RECORDS, width=70).splitlines()
    assert max(map(len, lines)) <= 70
    assert len(lines) == len(TABLE.splitlines())


def test_too_narrow_for_rows_gives_paragraphs():
    lines = table(RECORDS, width=50).splitlines()
    assert max(map(len, lines)) <= 50
    assert lines[:2] == ["plain DDP", "  step time, median, ms                 101.0"]
    assert "  speed-up against plain DDP            1.11x" in lines


def test_notes_stand_only_where_they_are_needed():
    assert table(RECORDS[2:]).splitlines()[-1].startswith("bf16")


def test_one_step_has_no_spread():
    assert record("fp16", (50,), 1.0).quartiles_s == (0.05, 0.05)


def test_records_and_settings_come_back_from_json():
    assert [Record.from_dict(json.loads(json.dumps(made.as_dict()))) for made in RECORDS] == RECORDS
    settings = Settings(steps=7, limit_s=3.0)
    assert Settings.from_dict(json.loads(json.dumps(asdict(settings)))) == settings


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
