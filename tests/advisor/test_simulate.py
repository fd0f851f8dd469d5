"""Predictions beyond this machine: what is asked for, what comes out, who wins."""

import json

import pytest

from gradwire.advisor import Link
from gradwire.advisor.cost import Prediction
from gradwire.advisor.simulate import Outlook, Scene, blocks, fastest, simulate
from gradwire.cli import main
from gradwire.cli.simulate import params_of, ranks_of, to_text, wins
from gradwire.errors import SpecError

SCENE = Scene(ranks=(2, 8), link=Link(1e8, 1e-4), compute_s=0.01, params=300_000)


def test_hooks_that_send_less_win_on_a_slow_link():
    outlooks = simulate(["exact", "noop", "bf16", "int4"], SCENE)
    assert [outlook.hook for outlook in outlooks] == ["exact", "noop", "bf16", "int4"]
    exact, noop, bf16, int4 = ([each.step_s for each in outlook.predictions] for outlook in outlooks)
    assert noop == [pytest.approx(0.01)] * 2
    for at in range(2):
        assert noop[at] < int4[at] < bf16[at] < exact[at]
    assert fastest(outlooks, SCENE) == {2: "int4", 8: "int4"}
    assert "fastest on 2 to 8 ranks: int4" in to_text(outlooks, SCENE)


def test_faster_codecs_never_hurt():
    slow, fast = (
        simulate(["topk"], Scene(ranks=(4,), link=Link(1e10), compute_s=0.01, params=300_000, codec_speed=speed))
        for speed in (0.01, 100.0)
    )
    assert fast[0].predictions[0].step_s < slow[0].predictions[0].step_s
    assert fast[0].predictions[0].sent_bytes == slow[0].predictions[0].sent_bytes


@pytest.mark.parametrize("params", [1000, 300_000, 124_000_000, 7_000_000_000])
def test_blocks_have_about_so_many_parameters(params):
    layouts = blocks(params)
    made = sum(part.numel for part in layouts[0]) * len(layouts)
    assert made == pytest.approx(params, rel=0.34) or len(layouts) == 1
    assert all(part.param.device.type == "meta" for part in layouts[0])


def test_nobody_wins_where_nobody_averages():
    assert fastest([Outlook("noop", False, (Prediction(1.0, 0, 0, 0, 0),) * 2)], SCENE) == {}
    assert wins({2: "a", 4: "a", 8: "b"}) == ["fastest on 2 to 4 ranks: a", "fastest on 8 ranks: b"]


def test_numbers_as_text():
    assert ranks_of("8..64") == (8, 16, 32, 64)
    assert ranks_of("8..50") == (8, 16, 32, 50)
    assert ranks_of("6,2,4,2") == (2, 4, 6)
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
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, argv, message):
    assert main(["simulate", *argv]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_json_from_the_command_line(capsys):
    argv = "simulate --ranks 2,4 --link 1gbit --latency 50us --compute 5ms --params 300k --hooks exact int8 --json"
    assert main(argv.split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scene"]["link"] == "1gbit,latency=50us"
    assert [row["hook"] for row in told["hooks"]] == ["exact", "int8"]
    assert [len(row["predictions"]) for row in told["hooks"]] == [2, 2]
    assert told["fastest"].keys() == {"2", "4"}


def test_ranks_that_are_none():
    with pytest.raises(SpecError, match="ranks must be between"):
        Scene(ranks=(), link=Link(1e9), compute_s=0.1)
