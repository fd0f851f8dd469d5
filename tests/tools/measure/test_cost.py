"""Rehearsals tell the bytes that real hooks send; predictions obey what no network can do without."""

import dataclasses
import itertools
import math

import pytest
import torch

from gradwire.advisor import Compute, Link, Send, Trace, predict, predict_step, rehearse
from gradwire.engine.gloo import FAR_S, FAR_THREADS, THREADS
from gradwire.errors import SpecError
from gradwire.exchanges import EXCHANGES, exchange
from gradwire.exchanges.bucket import Bucket, segments_of
from gradwire.exchanges.two_level import TwoLevel
from gradwire.testing import thread_ranks
from gradwire.tools.measure.fit import Fit

SPECS = [
    *EXCHANGES,
    "bf16:accumulate=wire",
    "int8:shots=one,feedback=true",
    "int4:allocate=true",
    "int4:exempt=none",
    "powersgd:rank=2,batched=true,resync=2",
    "powersgd:rank=1,wire=int8,iterations=2",
    "powersgd:rank=2,sides=one",
]
SHAPES = [(40, 70), (70,), (128, 64), (64,), (9, 8), (300, 101)]
STEPS = 3


def _layouts():
    """Two buckets of odd shapes."""
    params, names = [torch.empty(shape) for shape in SHAPES], [f"layer{i}" for i in range(len(SHAPES))]
    return [segments_of(params[3:], names[3:]), segments_of(params[:3], names[:3])]


def _sent_bytes(rank, specs):
    """Per step, by spec, as real hooks report it."""
    sent = {}
    for spec in specs:
        hook = rank.hook(spec, chunk_bytes=1 << 16)
        for step in range(STEPS):
            for index, layout in enumerate(_layouts()):
                generator = torch.Generator().manual_seed(rank.rank + 10 * step)
                flat = torch.randn(sum(part.numel for part in layout), generator=generator)
                bucket = Bucket(index, flat, layout, is_last=index == 1)
                hook.begin(bucket)
                hook.mean(bucket).wait()
        sent[spec] = hook.stats().sent_bytes
        hook.close()
    return sent


@pytest.fixture(autouse=True)
def _short_rehearsals(monkeypatch):
    """The bytes do not depend on what is in the caches."""
    monkeypatch.setattr("gradwire.tools.measure.rehearse.COLD_BYTES", 4096)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.thorough) for size in (3, 4))])
def test_bytes_are_those_of_the_real_hook(size):
    measured = thread_ranks(size, lambda rank: _sent_bytes(rank, SPECS), timeout_s=300)
    for spec in SPECS:
        traces = rehearse(exchange(spec), _layouts(), size, steps=STEPS, chunk_bytes=1 << 16)
        told = sum(trace.sent_bytes for bucket in traces for trace in bucket)
        if "allocate" in spec:  # the widths follow the values, and with them the padding
            assert told == pytest.approx(measured[0][spec], rel=0.05)
        else:
            assert told == pytest.approx(measured[0][spec], rel=1e-9), spec


def test_two_levels_are_rehearsed_too():
    spec = TwoLevel(exchange("exact"), exchange("int4"), node=2)
    measured = thread_ranks(4, lambda rank: _sent_bytes(rank, [spec]))
    traces = rehearse(spec, _layouts(), 4, steps=STEPS, chunk_bytes=1 << 16)
    assert sum(trace.sent_bytes for bucket in traces for trace in bucket) == pytest.approx(measured[0][spec])
    assert {send.size for bucket in traces for trace in bucket for send in trace.sends} == {1, 2}


def test_a_rehearsal_tells_the_way_over_the_wire():
    ((trace,),) = rehearse(exchange("int8"), _layouts()[:1], 4)
    assert [send.collective for send in trace.sends] == ["all_to_all", "all_gather"]
    assert all(send.work_s > 0 and send.size == 4 for send in trace.sends)
    assert trace.work_s > 0
    assert rehearse(exchange("noop"), _layouts(), 4) == [[], []]
    assert rehearse(exchange("int8"), _layouts(), 1) == [[], []]


def test_equal_buckets_are_rehearsed_once():
    first, second = rehearse(exchange("bf16"), _layouts()[:1] * 2, 2)
    assert first is second


def test_a_rehearsal_can_begin_after_the_warm_up():
    spec = exchange("powersgd:rank=1,warmup=50")
    early, late = (rehearse(spec, _layouts()[:1], 2, at_step=step)[0][0] for step in (0, 50))
    assert len(early.sends) == 1
    assert len(late.sends) == 2
    assert late.sent_bytes < early.sent_bytes / 2


def test_what_nobody_could_run_is_refused():
    big = torch.empty((1024, 4096), device="meta")
    with pytest.raises(SpecError, match="on 4096 ranks one chunk would receive 17 GB; use shots=auto, or fewer ranks"):
        rehearse(exchange("int8:shots=one"), [segments_of([big], ["big"])], 4096)


# -- the play of one rank ----------------------------------------------------------------------------------------------

ALONE = Compute(forward_s=1.0, ready_s=(2.0,), backward_s=2.0, after_s=0.5, cores=8)
LINK = Link(8e6 * 1514 / 1448)  # 1 MB of payload a second


def _trace(*pairs, work_s=0.0):
    return Trace(tuple(Send(work, "all_gather", 2, sent) for work, sent in pairs), work_s)


def test_one_chunk_does_one_thing_after_the_other():
    found = predict_step([[_trace((0.1, 1e6), (0.2, 2e6), work_s=0.3)]], Link(LINK.bits_per_s, 0.05), ALONE)
    assert found.step_s == pytest.approx(ALONE.step_s + 0.1 + 0.2 + 0.3 + 3.0 + 2 * 0.05)
    assert found.exposed_s == pytest.approx(found.step_s - ALONE.step_s)
    assert found.sent_bytes == 3e6
    assert found.work_s == pytest.approx(0.6)
    assert found.wire_s == pytest.approx(3.0)


def test_work_hides_behind_the_wire():
    chunks = [_trace((0.1, 1e6), work_s=0.1)] * 4
    found = predict_step([chunks], LINK, ALONE)
    assert found.exposed_s == pytest.approx(0.1 + 4.0 + 0.1)


def test_latency_of_several_chunks_overlaps():
    near = Link(1e9, 0.9 * FAR_S)
    assert _exposed_s(THREADS, near) == pytest.approx(near.latency_s)
    assert _exposed_s(2 * THREADS, near) == pytest.approx(2 * near.latency_s)


def test_on_a_link_with_a_high_latency_more_chunks_are_in_flight():
    far = Link(1e9, 0.5)
    assert _exposed_s(FAR_THREADS, far) == pytest.approx(0.5)
    assert _exposed_s(FAR_THREADS + 1, far) == pytest.approx(1.0)
    assert _exposed_s(FAR_THREADS, far, at_once=THREADS) == pytest.approx(FAR_THREADS / THREADS * 0.5)


def _exposed_s(chunks, link, **how):
    return predict_step([[_trace((0.0, 0.0))] * chunks], link, ALONE, **how).exposed_s


def test_early_buckets_hide_behind_backward():
    compute = Compute(forward_s=0.0, ready_s=(0.5, 2.0), backward_s=2.0, cores=8)
    found = predict_step([[_trace((0.0, 1e6))], [_trace((0.0, 1e6))]], LINK, compute)
    assert found.step_s == pytest.approx(3.0)


def test_on_one_core_work_takes_its_time_from_backward():
    compute = Compute(forward_s=0.0, ready_s=(0.5, 2.0), backward_s=2.0, cores=1)
    found = predict_step([[_trace((0.3, 0.0), work_s=0.2)], []], LINK, compute)
    assert found.step_s == pytest.approx(2.5)


def test_lanes_keep_their_order():
    """The second chunk's first collective is free at once, but waits for the first chunk's."""
    found = predict_step([[_trace((1.0, 0.0)), _trace((0.0, 1e6))]], LINK, ALONE)
    assert found.exposed_s == pytest.approx(2.0)


def test_inside_a_node_costs_nothing():
    chunk = Trace((Send(0.0, "all_reduce", 1, 1e9), Send(0.0, "all_gather", 2, 1e6)), 0.0)
    assert predict_step([[chunk]], LINK, ALONE).exposed_s == pytest.approx(1.0)


# -- the processor time of collectives ---------------------------------------------------------------------------------

TOLL = {"all_gather": Fit(0.1, 10e6, 1.0)}  # 0.1 s, and as much for each MB


def test_sending_hides_the_processor_time_of_a_free_core():
    found = predict_step([[_trace((0.0, 1e6))]], LINK, ALONE, TOLL)
    assert found.exposed_s == pytest.approx(1.0)
    assert found.handling_s == pytest.approx(0.2)


def test_a_collective_is_not_over_before_the_processor_has_seen_to_it():
    found = predict_step([[_trace((0.0, 1e6), work_s=0.3)]], Link(1e12), ALONE, TOLL)
    assert found.exposed_s == pytest.approx(0.2 + 0.3, abs=1e-4)


def test_on_one_core_collectives_take_their_time_from_backward():
    compute = Compute(forward_s=0.0, ready_s=(0.5, 2.0), backward_s=2.0, cores=1)
    found = predict_step([[_trace((0.0, 1e6))], []], Link(1e12), compute, TOLL)
    assert found.step_s == pytest.approx(2.2)


def test_inside_a_node_there_is_no_toll():
    chunk = Trace((Send(0.0, "all_gather", 1, 1e6),), 0.0)
    assert predict_step([[chunk]], LINK, ALONE, TOLL).handling_s == 0.0


def test_what_has_no_toll_is_free():
    chunk = Trace((Send(0.0, "all_reduce", 2, 1e6),), 0.0)
    assert predict_step([[chunk]], LINK, ALONE, TOLL).handling_s == 0.0


def test_buckets_must_match_the_compute():
    with pytest.raises(SpecError, match="compute has times for 1 buckets, but there are 2"):
        predict_step([[], []], LINK, ALONE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward_s": -1.0},
        {"ready_s": (2.0, 1.0)},
        {"cores": 0},
        {"threads": 0},
        {"crowd": 0.5},
        {"backward_s": float("nan")},
    ],
)
def test_bad_compute(wrong):
    with pytest.raises(SpecError, match="compute: "):
        Compute(**{"forward_s": 1.0, "ready_s": (1.0,), "backward_s": 2.0, **wrong})


def _even(trace):
    """With work that no other process has disturbed."""
    return Trace(tuple(dataclasses.replace(send, work_s=1e-5) for send in trace.sends), 1e-5)


def _rising(steps):
    """Chunks that overtake each other may cost a little where the link is faster."""
    return all(later >= 0.98 * earlier for earlier, later in itertools.pairwise(steps))


@pytest.mark.parametrize("spec", EXCHANGES)
def test_predictions_are_monotone_in_bandwidth_and_latency(spec):
    traces = [[_even(trace) for trace in bucket] for bucket in rehearse(exchange(spec), _layouts(), 3)]
    compute = Compute(forward_s=0.001, ready_s=(0.001, 0.002), backward_s=0.002, cores=8)
    assert _rising([predict_step(traces, Link(rate), compute).step_s for rate in (1e9, 1e8, 1e7, 1e6)])
    assert _rising([predict_step(traces, Link(1e8, delay), compute).step_s for delay in (0.0, 1e-4, 1e-2)])
    assert predict_step(traces, Link(1e12), compute).step_s >= compute.step_s


@pytest.mark.parametrize("spec", [name for name in EXCHANGES if name != "noop"])
def test_more_ranks_take_longer_on_a_slow_link(spec):
    """The wire decides on it: at 1 Mbit/s no noise of the rehearsal shows."""
    compute = Compute(forward_s=0.0, ready_s=(0.001, 0.002), backward_s=0.002)
    steps = [predict(exchange(spec), _layouts(), size, Link(1e6, 1e-3), compute).step_s for size in (2, 4, 16)]
    assert steps == sorted(steps)


def test_on_crowded_cores_chunks_and_collectives_take_longer_and_the_compute_does_not():
    """Four ranks on two cores: the compute was measured beside the other ranks, everything else by itself."""
    compute = Compute(forward_s=1.0, ready_s=(1.0,), backward_s=1.0)
    trace, free = Trace((Send(0.1, "all_gather", 4, 0.0),), 0.2), Link.parse("100gbit")
    cpu_cost = {"all_gather": Fit(0.05, math.inf, 1.0)}
    alone, crowded = (
        predict_step([[trace]], free, dataclasses.replace(compute, crowd=crowd), cpu_cost).step_s
        for crowd in (1.0, 2.0)
    )
    assert alone == pytest.approx(2.0 + 0.1 + 0.05 + 0.2)
    assert crowded == pytest.approx(2.0 + 2 * (0.1 + 0.05 + 0.2))
