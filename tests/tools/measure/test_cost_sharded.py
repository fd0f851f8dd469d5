"""Predicted steps of models with `fully_shard`: what blocks, what overlaps, and what is sent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from gradwire.errors import SpecError
from gradwire.exchanges import exchange
from gradwire.models.fsdp import MOST_PENDING
from gradwire.tools.cli import main
from gradwire.tools.launch.link import PAYLOAD, Link
from gradwire.tools.measure.alternate_sharded import Event, Timeline
from gradwire.tools.measure.cost import Engine
from gradwire.tools.measure.cost_sharded import Direction, predict_sharded
from gradwire.tools.measure.rehearse import Send, Trace, rehearse_gather, rehearse_scatter
from gradwire.tools.measure.simulate import Scene, picks
from gradwire.tools.measure.simulate_sharded import (
    PAIRS,
    layouts,
    scatter_error,
    simulate_sharded,
    timeline_of,
)

pytestmark = pytest.mark.usefixtures("recorded_work")
LINK = Link(8 / PAYLOAD)  # a byte per second


def sends(*seconds: float, work_s: float = 0.0) -> list[list[Trace]]:
    """One message per unit, that takes so long on the link."""
    return [[Trace((Send(work_s, "all_gather", 2, sent),), 0.0)] for sent in seconds]


def coded(*seconds: float) -> Direction:
    return Direction(sends(*seconds), Engine(LINK))


def plain(*seconds: float) -> Direction:
    return Direction(sends(*seconds), Engine(LINK), blocks=True)


def steps(*events: tuple[str, int, float], step_s: float) -> Timeline:
    return Timeline(step_s, tuple(Event(what, unit, at_s, 7.0) for what, unit, at_s in events))


GATHER = steps(("gather", 0, 0.0), ("need", 0, 4.0), step_s=10.0)


@pytest.mark.parametrize(
    ("gathers", "step_s"),
    [
        (coded(3.0), 10.0),  # hidden behind what happens until the parameters are needed
        (coded(6.0), 12.0),
        (plain(3.0), 13.0),
        (Direction(sends(3.0), Engine(LINK), blocks=True, measured=True), 17.0),
    ],
)
def test_a_gather_is_waited_for_where_its_parameters_are_needed(gathers: Direction, step_s: float) -> None:
    found, parameters = predict_sharded(GATHER, plain(0.0), gathers)
    assert found.step_s == pytest.approx(step_s)
    assert (found.sent_bytes, parameters) == (gathers.bytes_of(0), gathers.bytes_of(0))


def reduces(what: str, count: int) -> Timeline:
    return steps(*((what, unit, float(unit)) for unit in range(count)), ("end", 0, float(count)), step_s=count + 1.0)


def test_only_some_reductions_run_beside_the_backward_pass() -> None:
    count = MOST_PENDING + 2
    long = [10.0] * count
    late, _ = predict_sharded(reduces("reduce_late", count), coded(*long), plain())
    assert late.step_s == pytest.approx(10.0 * count + 1.0)  # the wire is never idle; one second is left after it
    assert predict_sharded(reduces("reduce", count), coded(*long), plain())[0].step_s == pytest.approx(
        10.0 * count + count + 1.0
    )
    short, _ = predict_sharded(reduces("reduce_late", count), coded(*[0.5] * count), plain())
    assert short.step_s == pytest.approx(count + 1.0)
    assert short.exposed_s == pytest.approx(0.0)


def test_both_directions_share_the_wire() -> None:
    both = steps(("reduce_late", 0, 0.0), ("gather", 1, 0.0), ("need", 1, 1.0), ("end", 0, 1.0), step_s=1.0)
    found, parameters = predict_sharded(both, coded(3.0, 0.0), coded(0.0, 2.0))
    assert found.step_s == pytest.approx(5.0)
    assert (found.sent_bytes, parameters) == (5.0, 2.0)


@pytest.mark.parametrize(("what", "step_s"), [("reduce_late", 6.0), ("reduce", 9.0)])
def test_replicas_are_averaged_after_every_reduction_on_a_link_of_their_own(what: str, step_s: float) -> None:
    """The first average goes on while the second reduction does, unless its result is needed at once."""
    across = Direction(sends(2.0, 2.0), Engine(Link(LINK.bits_per_s)))
    found, _ = predict_sharded(reduces(what, 2), plain(1.0, 1.0), plain(), across)
    assert found.step_s == pytest.approx(step_s)


# -- simulated models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rehearse", "passes"), [(rehearse_scatter, 2), (rehearse_gather, 1)])
def test_rehearsed_bytes_are_those_of_the_codec(rehearse: Callable[..., list[list[Trace]]], passes: int) -> None:
    units = layouts(300_000, 4)
    exact, int8 = (sum(t.sent_bytes for t in rehearse(exchange(spec), units, 4)[0]) for spec in ("exact", "int8"))
    assert exact == passes * 3 * 4 * units[0].row
    assert 1.0 <= int8 / (3 * units[0].row) < 1.1


SCENE = Scene(mode="fsdp", ranks=(2, 4), links=(Link(1e7),), compute_s=0.01, params=300_000)


def test_fewer_bits_win_on_a_slow_link_but_not_those_that_change_the_weights() -> None:
    found = {each.hook: each for each in simulate_sharded(["bf16", "int8/bf16", "int8/int8"], SCENE)}
    assert list(found) == ["exact", "bf16", "int8/bf16", "int8/int8"]
    times = [[each.predictions[0][at].step_s for each in found.values()] for at in range(2)]
    assert all(row == sorted(row, reverse=True) for row in times)
    assert [pick.hook for pick in picks(list(found.values()), SCENE)[0]] == ["int8/bf16"] * 2
    assert [each.mark for each in found.values()] == ["", "", "", " ‡"]


def test_the_default_step_gathers_twice_and_reduces_once() -> None:
    (row,) = simulate_sharded(["exact"], SCENE)[0].predictions
    values = sum(unit.row for unit in layouts(SCENE.params, 2))
    assert row[0].sent_bytes == 4 * values * (2 + 2)  # gloo reduces in two passes
    timeline = timeline_of(3, 3.0)
    assert [event.unit for event in timeline.events if event.what == "gather"] == [0, 1, 2, 2, 1, 0]
    assert [event.at_s for event in timeline.events] == sorted(event.at_s for event in timeline.events)


def test_hsdp_sends_shards_across_nodes() -> None:
    scene = Scene(mode="hsdp", shards=2, ranks=(4,), links=(Link(1e7),), compute_s=0.01, params=300_000)
    exact, int4 = simulate_sharded(["int4"], scene)
    assert exact.predictions[0][0].step_s > 3 * int4.predictions[0][0].step_s
    slow = Scene(
        mode="hsdp", shards=2, ranks=(4,), links=(Link(1e7),), compute_s=0.01, params=300_000, inside=Link(1e6)
    )
    assert simulate_sharded([], slow)[0].predictions[0][0].step_s > exact.predictions[0][0].step_s
    with pytest.raises(SpecError, match="4 ranks are not two or more replicas of 4 shards"):
        simulate_sharded([], Scene(mode="hsdp", shards=4, ranks=(4,), links=(Link(1e7),), compute_s=0.01))


def test_errors_of_a_reduce_scatter_grow_with_fewer_bits() -> None:
    errors = [scatter_error(exchange(spec)) for spec in ("exact", "bf16", "int8", "int4")]
    assert errors == sorted(errors)
    assert errors[0] == 0.0 < errors[1]
    assert 0.003 < errors[2] < 0.01


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("simulate", "--params", "300k", "--compute", "10ms", "--link", "10mbit")
    assert main([*common, "--mode", "fsdp", "--ranks", "2", "--hooks", "int8/bf16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["hook"] for each in told["hooks"]] == ["exact", "int8/bf16"]
    assert told["scene"]["mode"] == "fsdp"
    assert math.isclose(told["picks"][0]["cells"][0]["speed_up"], 2.5, rel_tol=0.4)
    assert main([*common, "--shards", "4"]) == 2
    assert "--shards and --inside are for --mode hsdp" in capsys.readouterr().err
    assert len(PAIRS) == 12
