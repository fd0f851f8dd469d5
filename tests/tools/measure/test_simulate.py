"""Predictions beyond this machine: what is asked for, what comes out, who wins."""

import itertools
import json
import math

import pytest

from gradwire.advisor import Link
from gradwire.errors import SpecError
from gradwire.exchanges import exchange
from gradwire.tools.cli import main
from gradwire.tools.cli.simulate import links_of, params_of, ranks_of, to_text, wins
from gradwire.tools.measure.simulate import Pick, Scene, blocks, noise_error, picks, simulate

from ..cli.messages import is_short
from ..report.forecasts import forecast

pytestmark = pytest.mark.usefixtures("recorded_work")
SCENE = Scene(ranks=(2, 8), links=(Link(1e8, 1e-4),), compute_s=0.01, params=300_000)


def test_hooks_that_send_less_win_on_a_slow_link():
    forecasts = simulate(["exact", "noop", "bf16", "int4"], SCENE)
    assert [forecast.hook for forecast in forecasts] == ["exact", "noop", "bf16", "int4"]
    exact, noop, bf16, int4 = ([each.step_s for each in forecast.predictions[0]] for forecast in forecasts)
    assert noop == [pytest.approx(0.01)] * 2
    for at in range(2):
        assert noop[at] < int4[at] < bf16[at] < exact[at]
    (row,) = picks(forecasts, SCENE)
    assert row == [Pick("int4", int4[at], exact[at] / int4[at]) for at in range(2)]
    told = to_text(forecasts, SCENE, [0.02, math.inf])
    assert "error at most 0.02, on 2 to 8 ranks: bf16" in told
    assert "any error, on 2 to 8 ranks: int4" in told


def test_every_link_is_a_row_and_exact_is_always_there():
    links = (Link(1e6), Link(1e14))
    forecasts = simulate(["bf16"], Scene(ranks=(2, 4, 8), links=links, compute_s=0.1, params=300_000))
    assert [forecast.hook for forecast in forecasts] == ["exact", "bf16"]
    for each in forecasts:
        slow, fast = ([found.step_s for found in row] for row in each.predictions)
        assert len(slow) == len(fast) == 3
        assert min(slow) > 5 * max(fast)
        assert slow == sorted(slow)


def test_faster_codecs_never_hurt():
    slow, fast = (
        simulate(["topk"], Scene(ranks=(4,), links=(Link(1e10),), compute_s=0.01, params=300_000, codec_speed=speed))
        for speed in (0.01, 100.0)
    )
    (slow,), (fast,) = slow[1].predictions[0], fast[1].predictions[0]
    assert fast.step_s < slow.step_s
    assert fast.sent_bytes == slow.sent_bytes


def test_random_values_tell_how_exact_a_hook_is():
    errors = [noise_error(exchange(spec)) for spec in ("exact", "fp16", "bf16", "int8", "int4", "sign")]
    assert all(0 < lower < 0.6 * higher for lower, higher in itertools.pairwise(errors))
    assert errors[0] < 1e-6
    assert errors[3] == pytest.approx(0.0092, rel=0.3)  # sqrt(7.5e-5): what facts about two-shot int8 say
    assert errors[-1] < 1
    assert noise_error(exchange("two_level:node=8,across=int4")) == pytest.approx(errors[4], rel=0.7)


# -- who wins ----------------------------------------------------------------------------------------------------------


def _picked(times, **options):
    """The one pick among hooks that take so long."""
    forecasts = [forecast(hook, [[step_s]]) for hook, step_s in times.items()]
    ((pick,),) = picks(forecasts, Scene(ranks=(2,), links=(Link(1e9),), compute_s=0.01), **options)
    return pick


def test_the_most_exact_within_3_percent_of_the_fastest_is_picked():
    assert _picked({"exact": 2.0, "bf16": 1.029, "int8": 1.02, "int4": 1.0}) == Pick("bf16", 1.029, 2.0 / 1.029)
    assert _picked({"exact": 2.0, "bf16": 1.031, "int8": 1.02, "int4": 1.0}).hook == "int8"
    assert _picked({"exact": 2.0, "bf16": 1.2, "int8": 1.1, "int4": 1.0}).hook == "int4"


def test_a_gain_of_less_than_10_percent_is_none():
    assert _picked({"exact": 1.09, "int8": 1.0}) == Pick("exact", 1.09, 1.0)
    assert _picked({"exact": 1.11, "int8": 1.0}).hook == "int8"


def test_what_loses_too_much_or_does_not_average_is_never_picked():
    times = {"exact": 2.0, "noop": 0.1, "int8": 1.5, "int4": 1.0}
    assert _picked(times).hook == "int4"
    assert _picked(times, max_error=0.02).hook == "int8"
    assert _picked(times, max_error=1e-9).hook == "exact"


def test_numbers_of_ranks_with_the_same_pick_are_told_together():
    scene = Scene(ranks=(2, 4, 8), links=(Link(1e9),), compute_s=0.01)
    forecasts = [forecast("exact", [[2.0, 2.0, 2.0]]), forecast("int8", [[1.0, 1.0, 2.0]])]
    assert wins(forecasts, scene, [math.inf]) == ["any error, on 2 to 4 ranks: int8", "any error, on 8 ranks: exact"]


def test_a_grid_as_text():
    scene = Scene(ranks=(2, 512), links=(Link(1e8), Link(1e9)), compute_s=0.01)
    forecasts = [forecast("exact", [[4.0, 8.0], [1.0, 2.0]]), forecast("int8", [[2.0, 3.0], [1.0, 1.0]])]
    assert to_text(forecasts, scene, [0.02]).splitlines() == [
        "Which hook to use: 124M parameters, 10.0 ms of compute, without latency",
        "",
        "error at most 0.02",
        "ranks                 2         512",
        "100 Mbit/s   int8 2.00x  int8 2.67x",
        "1 Gbit/s    exact 1.00x  int8 2.00x",
    ]


@pytest.mark.parametrize("params", [1000, 300_000, 124_000_000, 7_000_000_000])
def test_blocks_have_about_so_many_parameters(params):
    layouts = blocks(params)
    made = sum(part.numel for part in layouts[0]) * len(layouts)
    assert made == pytest.approx(params, rel=0.34) or len(layouts) == 1
    assert all(part.param.device.type == "meta" for part in layouts[0])


def test_numbers_as_text():
    assert ranks_of("8..64") == (8, 16, 32, 64)
    assert ranks_of("8..50") == (8, 16, 32, 50)
    assert ranks_of("6,2,4,2") == (2, 4, 6)
    assert links_of(["1gbit", "100mbit", "1gbit"], "5ms") == (Link(1e8, 5e-3), Link(1e9, 5e-3))
    assert (params_of("124M"), params_of("1.3B"), params_of("5k"), params_of("1000")) == (124e6, 1.3e9, 5000, 1000)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "8..4"], "--ranks must be a range such as 8..512 or a list such as 2,4,6, got '8..4'"),
        (["--ranks", "many"], "got 'many'"),
        (["--ranks", "1,2"], "ranks must be between 2 and 4096, got [1, 2]"),
        (["--ranks", "8..8192"], "ranks must be between 2 and 4096"),
        (["--link", "10"], "the rate must be a number with kbit, mbit, gbit, got '10'"),
        (["--link", "1gbit,latency=1ms", "--latency", "2ms"], "the latency is given twice"),
        (["--compute", "0ms"], "compute_s must be above 0"),
        (["--compute", "1"], "--compute must be a number with us, ms, s, got '1'"),
        (["--params", "lots"], "--params must be a number such as 124M or 1.3B, got 'lots'"),
        (["--params", "10"], "params must be between 1000 and 10^12, got 10"),
        (["--hooks", "int9"], "unknown hook 'int9'"),
        (["--cores", "0"], "cores must be above 0"),
        (["--max-error", "0"], "must be above 0, or inf for no limit, got '0'"),
    ],
)
def test_bad_input_has_a_short_message_and_exit_code_2(capsys, argv, message):
    assert main(["simulate", *argv]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert is_short(printed.err)


def test_json_and_a_page_from_the_command_line(capsys, tmp_path):
    page = tmp_path / "winners.html"
    argv = (
        "simulate --ranks 2,4 --links 1gbit 1mbit --latency 50us --compute 5ms --params 300k --hooks exact int8 --json"
    )
    assert main([*argv.split(), "--max-error", "0.02", "inf", "--report", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scene"]["links"] == ["1mbit,latency=50us", "1gbit,latency=50us"]
    assert [row["hook"] for row in told["hooks"]] == ["exact", "int8"]
    assert [[len(line) for line in row["predictions"]] for row in told["hooks"]] == [[2, 2], [2, 2]]
    assert [limit["max_error"] for limit in told["picks"]] == [0.02, None]
    cell = told["picks"][0]["cells"][1]
    exact, int8 = (row["predictions"][0][1]["step_s"] for row in told["hooks"])
    assert cell == {"link": "1mbit,latency=50us", "ranks": 4, "hook": "int8", "step_s": int8, "speed_up": exact / int8}
    assert told["report"] == str(page)
    assert f'value="{exact / int8!r}"' in page.read_text()


def test_a_page_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path):
    assert main(["simulate", "--report", str(tmp_path / "none" / "winners.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_nothing_to_predict():
    with pytest.raises(SpecError, match="ranks must be between"):
        Scene(ranks=(), links=(Link(1e9),), compute_s=0.1)
    with pytest.raises(SpecError, match="no link to predict for"):
        Scene(ranks=(2,), links=(), compute_s=0.1)
