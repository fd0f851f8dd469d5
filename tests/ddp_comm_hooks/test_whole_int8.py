"""The codec behind the drop-in quantization hooks keeps the laws of the registered ones."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.codecs import CODECS
from gradwire.ddp_comm_hooks._whole_int8 import WholeInt8
from gradwire.errors import SpecError
from gradwire.exchanges import Coded
from gradwire.testing.contracts import CODEC_CHECKS, EXCHANGE_CHECKS, gaussian

ROWS = (None, 1, 3, 100, 513, 100_000)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("check", CODEC_CHECKS, ids=lambda check: check.__name__)
def test_codec_laws(check, row):
    check(WholeInt8(row))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("row", [None, 100])
@pytest.mark.parametrize("check", EXCHANGE_CHECKS, ids=lambda check: check.__name__)
def test_exchange_laws(check, row, size):
    check(Coded(WholeInt8(row)), size)


def test_not_registered():
    assert WholeInt8.name not in CODECS


def test_spec_contains_the_rows():
    """All ranks compare this text when a hook is made."""
    assert [str(Coded(WholeInt8(row))) for row in (None, 100)] == ["whole_int8", "whole_int8:row=100"]


@pytest.mark.parametrize("row", [0, -1, 2.0, True, "512"])
def test_wrong_row_is_refused(row):
    with pytest.raises(SpecError, match="row must be a whole number of at least 1, got"):
        WholeInt8(row)


def test_wire():
    """[ scale ][ codes ][ padding ], and a scale for each row where there are rows."""
    wire = WholeInt8().encode(torch.tensor([127.0, -1.0, 0.4, 63.6, -127.0]))
    torch.testing.assert_close(wire[:4].view(torch.float32), torch.ones(1))
    assert wire[4:9].view(torch.int8).tolist() == [127, -1, 0, 64, -127]
    assert wire.numel() == 12
    rows = WholeInt8(row=2).encode(torch.tensor([127.0, 0.0, 254.0, 254.0, 381.0]))
    torch.testing.assert_close(rows[:12].view(torch.float32), torch.tensor([1.0, 2.0, 3.0]))
    assert rows[12:17].view(torch.int8).tolist() == [127, 0, 127, 127, 127]


def test_every_value_is_within_half_a_step():
    values = gaussian(1001)
    for row in ROWS:
        error = (WholeInt8(row).decode(WholeInt8(row).encode(values), 1001) - values).abs()
        for own, part in zip(error.split(row or 1001), values.split(row or 1001), strict=True):
            assert own.max() <= part.abs().max() / 254 * 1.0001


def test_bad_rows_are_nan_and_others_are_not():
    values = gaussian(300)
    values[7], values[250] = torch.inf, torch.nan
    finite = WholeInt8(100).decode(WholeInt8(100).encode(values), 300).isfinite()
    assert [part.tolist() for part in finite.split(100)] == [[False] * 100, [True] * 100, [False] * 100]
    assert not WholeInt8().decode(WholeInt8().encode(values), 300).isfinite().any()


def test_no_loop_over_rows():
    """The work is as many torch operations for 10 rows as for 10 000 (torch's 3.28)."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    counts = set()
    for rows in (10, 10_000):
        with Counting() as seen:
            values = torch.ones(100 * rows - 1)
            WholeInt8(100).decode_(values, WholeInt8(100).encode(values))
        counts.add(seen.count)
    assert len(counts) == 1
