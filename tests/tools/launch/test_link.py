"""Links as text, and the emulated link: how long collectives take at least, and that lanes share it."""

import threading

import pytest
import torch

from gradwire.advisor import EmulatedLink, Link, emulate
from gradwire.engine.lanes import slow_link
from gradwire.errors import SpecError
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import thread_ranks
from gradwire.tools.launch.link import PAYLOAD, seconds

from ..fake_time import FakeClock, TimelessLink


@pytest.mark.parametrize(
    ("text", "bits_per_s", "latency_s"),
    [
        ("100mbit", 1e8, 0.0),
        ("1gbit,latency=5ms", 1e9, 5e-3),
        (" 1.5 gbit , latency = 50us ", 1.5e9, 50e-6),
        ("64kbit,latency=1s", 64e3, 1.0),
        ("10GBIT", 1e10, 0.0),
    ],
)
def test_text(text, bits_per_s, latency_s):
    assert Link.parse(text) == Link(bits_per_s, latency_s)


@pytest.mark.parametrize("text", ["100mbit", "10gbit,latency=50us", "2.5gbit,latency=1.5ms", "12.5kbit,latency=2s"])
def test_text_comes_back_as_it_was(text):
    assert str(Link.parse(text)) == text


@pytest.mark.parametrize("link", [Link(1e8 / 3), Link(0.1, 1e-9), Link(7e12, 1 / 3), Link(123456789.0)])
def test_every_link_round_trips(link):
    assert Link.parse(str(link)) == link


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100", "the rate must be a number with kbit, mbit, gbit, got '100'"),
        ("fast", "got 'fast'; write for instance 100mbit"),
        ("", "the rate must be a number"),
        (None, "a link is text, got NoneType; write for instance 100mbit"),
        ("-1mbit", "got '-1mbit'"),
        ("0mbit", "the rate must be above 0"),
        ("1e400gbit", "must be above 0 and finite"),
        (
            "1gbit,latency=5",
            "latency must be a number with us, ms, s, got '5'; write for instance 100mbit",
        ),
        ("1gbit,delay=5ms", "at most latency=, got 'delay=5ms'"),
        ("1gbit,latency=5ms,latency=6ms", "at most latency=, got 'latency=6ms'"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(SpecError) as caught:
        Link.parse(text)
    assert message in str(caught.value)


def test_seconds_names_what_is_wrong():
    assert seconds("250ms") == 0.25
    with pytest.raises(
        SpecError, match="--compute must be a number with us, ms, s, got '3 hours'; write for instance 50us"
    ):
        seconds("3 hours", "--compute")


def test_cost_counts_hops_and_headers():
    link = Link(8e6, 1e-3)
    assert link.cost_s("all_reduce", 4, 1e6) == (pytest.approx(6e-3), pytest.approx(1 / PAYLOAD))
    assert link.cost_s("all_gather", 4, 0)[0] == link.cost_s("all_to_all", 4, 0)[0] == pytest.approx(3e-3)


LINK = Link(40e6, 0.01)
NUMEL = 50_000


def _traffic(rank, collective):
    """What a hook counts in one collective on an emulated link."""
    with emulate(TimelessLink(LINK)):
        hook = rank.hook("exact")
    tensor = torch.ones(rank.size, NUMEL) if collective == "all_to_all" else torch.ones(NUMEL)
    counted = []

    def job(comm):
        getattr(comm, collective)(tensor)
        counted.append((comm.traffic.wire_s, comm.traffic.sent_bytes))

    hook.run(job)
    return counted[0]


@pytest.mark.parametrize(
    ("collective", "hops", "times"), [("all_reduce_", 4, 4 / 3), ("all_gather", 2, 2), ("all_to_all", 2, 2)]
)
def test_a_collective_takes_latency_and_bytes(collective, hops, times):
    for wire_s, sent_bytes in thread_ranks(3, lambda rank: _traffic(rank, collective)):
        assert sent_bytes == pytest.approx(4 * NUMEL * times)
        assert wire_s >= (hops * LINK.latency_s + sent_bytes * 8 / LINK.bits_per_s) * (1 - 1e-9)


def _two_at_once(rank):
    """Two hooks on one link, that is lanes of two engines, each with an all-gather at the same time."""
    with emulate(TimelessLink(Link(40e6), runs=False)) as link:
        hooks = [rank.hook("exact"), rank.hook("exact")]
    tensor, before_s = torch.ones(NUMEL), link.busy_until  # hooks agree about themselves when they are made
    works = [hook.runner.submit([lambda comm: comm.all_gather(tensor)], tensor, counted=False) for hook in hooks]
    for work in works:
        work.wait()
    return link.busy_until - before_s


def test_lanes_and_engines_share_the_link():
    one_s = 4 * NUMEL * 8 / 40e6 / PAYLOAD
    assert thread_ranks(2, _two_at_once) == [pytest.approx(2 * one_s)] * 2


def _chunks(rank):
    """Two-shot uses two lanes and several threads; all chunks together must not send faster than the link."""
    with emulate(TimelessLink(Link(20e6), runs=False)) as link:
        hook = rank.hook("int8", chunk_bytes=1 << 16)
    bucket = make_bucket([torch.ones(100_000)])
    hook.begin(bucket)
    before_s = link.busy_until
    hook.mean(bucket).wait()
    return link.busy_until - before_s, hook.stats().sent_bytes


def test_chunks_share_the_link():
    for busy_s, sent_bytes in thread_ranks(3, _chunks):
        assert sent_bytes > 100_000
        assert busy_s == pytest.approx(sent_bytes * 8 / 20e6 / PAYLOAD)


def test_threads_wait_for_each_other():
    clock = FakeClock(runs=False)
    link = EmulatedLink(Link(1e6), clock, clock.sleep)
    threads = [threading.Thread(target=link.hold, args=("all_gather", 2, 1000, 0.0)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one_s = 1000 * 8 / 1e6 / PAYLOAD
    assert sorted(clock.slept) == pytest.approx([(index + 1) * one_s for index in range(5)])


def test_time_that_has_passed_counts():
    clock = FakeClock()
    link = EmulatedLink(Link(1e6), clock, clock.sleep)
    assert link.hold("all_gather", 2, 1000, 10.0) == 0.0  # it was issued 10 s ago and needs 8 ms
    assert link.busy_until < clock.now
    assert clock.slept == []


def test_only_engines_made_inside_are_slow():
    with emulate("1gbit") as emulated:
        assert slow_link.get() == emulated.hold
        with pytest.raises(ZeroDivisionError), emulate("1mbit"):
            raise ZeroDivisionError
        assert slow_link.get() == emulated.hold
    assert slow_link.get() is None
