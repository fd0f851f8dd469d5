"""The probe between thread ranks on an emulated link, and from the command line."""

import json
import math

import pytest

from gradwire.advisor import Link, emulate
from gradwire.codecs import CODECS, Int8
from gradwire.engine.links import SHORT_SUM, SMALL_BYTES, way
from gradwire.errors import SpecError
from gradwire.testing import thread_ranks
from gradwire.tools.cli import main
from gradwire.tools.cli.probe import to_text
from gradwire.tools.launch.link import HOPS
from gradwire.tools.measure import probe as probing
from gradwire.tools.measure.cost import _cpu_cost_s
from gradwire.tools.measure.fit import Fit
from gradwire.tools.measure.probe import Probe, Row, codec_speed, probe
from gradwire.tools.measure.rehearse import Send

LINK = Link(50e6, 2e-3)
ROWS = (Row(1 << 10, 2, True), Row(1 << 14, 2), Row(1 << 18, 2))


class IdleLoad:
    """Takes no CPU time, so what is measured is what collectives take alone."""

    def calibrate(self):
        return self

    def taken_by(self, act, repeats):
        for _ in range(repeats):
            act()
        return 0.0


def reaches(found, link, collective, size, *sent_bytes):
    """Whether a fit is as slow as the link at one of these sizes at least.

    No time that was measured is shorter than the link's. Of two lines one of which has no point below it the other
    cannot lie below at both ends, however noisy the machine is.
    """
    return any(found.seconds(each) >= 0.999 * sum(link.cost_s(collective, size, each)) for each in sent_bytes)


def _probe(rank):
    with emulate(LINK):
        return probe(rank.hook("exact"))


def test_between_ranks_on_a_known_link(monkeypatch):
    monkeypatch.setattr(probing, "ROWS", ROWS)
    monkeypatch.setattr(probing, "_load", IdleLoad)
    monkeypatch.setattr(probing, "REPEATS", 2)
    first, *others = thread_ranks(3, _probe)
    assert all(
        (other.fits, other.cpu_cost) == (first.fits, first.cpu_cost) for other in others
    )  # all decide alike by them
    assert (first.size, len(first.hosts), first.pairs) == (3, 3, {})
    assert first.speeds.keys() == CODECS.keys()
    for collective, found in first.fits.items():
        assert reaches(found, LINK, collective, 3, 0, 1 << 19)
        assert found.alpha_s >= 0
        assert found.r_squared <= 1.0


def test_a_held_collective_waits_without_a_processor(monkeypatch):
    """So the emulated link shows in the time and not in the CPU time."""
    monkeypatch.setattr(probing, "ROWS", ROWS)
    monkeypatch.setattr(probing, "_load", IdleLoad)
    monkeypatch.setattr(probing, "BETWEEN_TWO", dict.fromkeys(probing.BETWEEN_TWO, ROWS))
    monkeypatch.setattr(probing, "REPEATS", 2)
    found = thread_ranks(2, _probe)[0]
    assert found.cpu_cost.keys() == found.fits.keys()
    for collective, cpu_cost in found.cpu_cost.items():
        assert 0 < cpu_cost.seconds(1 << 19) < found.fits[collective].seconds(1 << 19)


def test_messages_are_of_the_size_that_was_asked_for():
    for size in (2, 3, 8):
        assert probing._message("all_reduce", size, 8000).numel() * 8 * (size - 1) / size == pytest.approx(
            8000, rel=0.01
        )
        assert probing._message("all_gather", size, 8000).numel() * (size - 1) == pytest.approx(8000, rel=0.01)
        assert probing._message("all_to_all", size, 8000).shape == (size, 8000 // (size - 1))


def test_costs_scale_with_the_hops():
    found = Probe(size=3, fits={"all_gather": Fit(2e-3, 1e6, 1.0)}, cpu_cost={}, speeds={}, hosts=("a", "a", "b"))
    assert found.cost_s("all_gather", 3, 1e6) == (pytest.approx(2e-3), pytest.approx(1.0))
    assert found.cost_s("all_gather", 5, 1e6) == (pytest.approx(4e-3), pytest.approx(1.0))


def test_small_sums_between_two_ranks_have_a_line_of_their_own():
    fits = {"all_reduce": Fit(3e-3, 1e6, 1.0), SHORT_SUM: Fit(1e-3, 2e6, 1.0)}
    assert way("all_gather", 2, SMALL_BYTES) == "all_gather"
    found = Probe(size=2, fits=fits, cpu_cost={}, speeds={}, hosts=("a", "b"))
    assert found.cost_s("all_reduce", 2, SMALL_BYTES) == (1e-3, SMALL_BYTES / 2e6)
    assert found.cost_s("all_reduce", 2, SMALL_BYTES + 1) == (3e-3, (SMALL_BYTES + 1) / 1e6)
    assert found.cost_s("all_reduce", 4, 1000) == pytest.approx((9e-3, 1e-3))
    assert _cpu_cost_s(Send(0.0, "all_reduce", 2, 1000), fits) == fits[SHORT_SUM].seconds(1000)


def test_one_rank_has_nothing_to_measure():
    with pytest.raises(SpecError, match="nothing to measure between 1 rank"):
        thread_ranks(1, lambda rank: probe(rank.hook("exact")))


def test_codecs_take_time():
    found = codec_speed(Int8(), numel=10_000)
    assert found.encode_ns > 0
    assert found.decode_ns > 0


@pytest.mark.long
def test_the_command_line_measures_between_processes(capfd, forked_ranks):
    assert main(["probe", "--link", "1gbit,latency=1ms", "--pairs", "--json"]) == 0
    printed = capfd.readouterr().out
    found = json.loads(printed)
    assert found["size"] == 2
    assert found["fits"].keys() == {*HOPS, SHORT_SUM}
    assert found["cpu_cost"].keys() == found["fits"].keys()
    infinite = {
        name: {key: math.inf if value is None else value for key, value in fit.items()}
        for name, fit in found["fits"].items()
    }
    assert reaches(Fit(**infinite["all_reduce"]), Link(1e9, 1e-3), "all_reduce", 2, 0, 1 << 23)
    assert found["pairs"].keys() == {"0-1"}
    text = to_text(json.loads(printed.replace('"bytes_per_s": null', '"bytes_per_s": Infinity')))
    assert "2 ranks on 1 host; codecs in ns per value" in text
    assert all(name in text for name in (*found["fits"], "0-1", *CODECS))
