"""The self-check: it passes here, it finds a planted mistake, and it says clearly what it cannot check."""

import json
import socket
from dataclasses import replace

import pytest
import torch

from gradwire import kernels
from gradwire.codecs import CODECS
from gradwire.errors import RegisterError
from gradwire.testing import spawn_ranks
from gradwire.tools.cli import main
from gradwire.tools.measure import selfcheck as checking
from gradwire.tools.measure.kernel_bits import kernel_differences, kernel_speed
from gradwire.tools.measure.selfcheck import Facts, Row, _agreed, _together, all_hooks, device_problem
from gradwire.tools.report.selfcheck import to_html, to_text

from ...kit.forked import run_programs

CPU = torch.device("cpu")
FACTS = Facts("host", "cpu", "x86", "torch 2", "numba", ("int8",))
PLANTED = """
import os, sys
from gradwire import kernels
from gradwire.tools.cli import main
os.environ["RANK"] = os.environ["LOCAL_RANK"] = sys.argv[1]
kernels.load()
right = kernels._numba.int8.encode_
def wrong(wire, *args):
    right(wire, *args)
    wire[:1] += 1
    return wire
kernels._numba.int8.encode_ = wrong
sys.exit(main(["selfcheck", "--device", "cpu", "--hooks", "int8"]))
"""


@pytest.mark.parametrize("name", CODECS)
def test_the_kernels_of_every_codec_have_the_bits_of_the_reference(name):
    kernels.load()
    assert kernel_differences(CODECS[name](), CPU) == []


def test_a_wrong_kernel_is_named_with_its_input(monkeypatch):
    numba = kernels.load()
    right = numba.sign.decode_
    monkeypatch.setattr(numba.sign, "decode_", lambda out, *rest: right(out, *rest).mul_(1.5))
    texts = kernel_differences(CODECS["sign"](), CPU)
    assert any(text.startswith("decode: 257 of 257 values differ, value 0 is ") for text in texts)
    assert any(text.endswith(" of 257 normal float32 values") for text in texts)


def test_within_reference_the_cpu_uses_torch_kernels():
    kernels.load()
    with kernels.reference():
        assert kernels.in_use(CPU) == "torch"
    assert kernels.in_use(CPU) == "numba"


def test_speed_is_relative_to_a_copy():
    speed = kernel_speed(CODECS["bf16"](), CPU)
    assert min(speed.encode_copies, speed.decode_copies, speed.copy_bytes_per_s) > 0


def test_all_hooks_are_checked_and_two_levels_where_ranks_can_be_split():
    assert {"exact", "int8", "powersgd", "topk", "two_level:node=2"} <= set(all_hooks(4))
    assert not any(hook.startswith("two_level") for hook in all_hooks(3))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", f"--device cuda: torch {torch.__version__} finds no such device on {socket.gethostname()}"),
        ("toaster", "--device 'toaster' is not a device of torch; use cpu or cuda"),
    ],
)
def test_a_device_that_is_not_there_is_an_error_before_anything_starts(capsys, device, message):
    assert main(["selfcheck", "--device", device]) == 2
    assert message in capsys.readouterr().err


def test_more_ranks_than_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_problem("cuda", 2) == ""
    assert "4 ranks need as many devices" in device_problem("cuda", 4)
    assert device_problem("cuda", 4).endswith(" has 2; use --nproc 2")


def _raised_by_ranks_that_differ(rank, size, change):
    try:
        _agreed(replace(FACTS, **change) if rank else FACTS)
    except RegisterError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda"}, "all ranks must have the same device, but rank 0 has 'cpu', rank 1 has 'cuda'"),
        ({"kernels": "torch"}, "all ranks must have the same kernels, but rank 0 has 'numba', rank 1 has 'torch'"),
        ({"hooks": ("int4",)}, "all ranks must have the same hooks, but rank 0 has ('int8',), rank 1 has ('int4',)"),
        ({"versions": "torch 1"}, "all ranks must have the same versions"),
        ({"problem": "no such device on b"}, "rank 1: no such device on b"),
    ],
)
def test_ranks_that_differ_all_learn_how(change, message):
    for text in spawn_ranks(2, _raised_by_ranks_that_differ, change):
        assert text.startswith(message)


def _texts_of_all(rank, size):
    return _together(["both", *(["only here"] if rank else [])])


def test_texts_name_their_ranks():
    assert spawn_ranks(2, _texts_of_all) == [["both (rank 0, 1)", "only here (rank 1)"]] * 2


def _checked(rank, size, hooks):
    checking.WORKLOADS = {"cpu": (checking.SMALL, 1)}
    return checking.run(rank, size, {"device": "cpu", "hooks": hooks}, lambda part, doing: None)


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.thorough), 4])
def test_it_passes_on_other_numbers_of_ranks(size):
    hooks = ["exact", "noop", "int4:feedback=true", *(["two_level:node=2"] if size == 4 else [])]
    results = spawn_ranks(size, _checked, hooks, timeout_s=500)
    assert {key: results[0][key] for key in ("failures", "passed", "ranks")} == {
        "failures": [],
        "passed": True,
        "ranks": size,
    }
    assert [row["hook"] for row in results[0]["rows"]] == ["plain", *hooks]


@pytest.mark.long
def test_the_command_checks_and_writes_json_and_a_page(capfd, tmp_path, forked_ranks):
    page = tmp_path / "selfcheck.html"
    words = ["selfcheck", "--device", "cpu", "--hooks", "int8", "powersgd", "--json", "--report", str(page)]
    assert main(words) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["passed"], result["failures"], result["ranks"]) == (True, [], 2)
    _, int8, powersgd = result["rows"]
    assert (int8["kernels"], int8["mean"], int8["training"], powersgd["kernels"]) == ([], [], [], None)
    assert 1e-3 < int8["error"] < 2e-2
    assert min(int8["step_s"], int8["wire_s"], int8["sent_bytes"], int8["encode_copies"]) > 0
    text = to_text(result)
    assert "Everything is right: 3 rows without a difference." in text
    assert [line.split()[:4] for line in text.splitlines() if line.startswith("int8 ")] == [["int8", "ok", "ok", "ok"]]
    assert '<th scope="row">powersgd</th>' in page.read_text()
    assert page.read_text() == to_html(result)


def test_a_planted_wrong_kernel_ends_with_1_and_is_named(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (first, out, err), (second, nothing, _) = run_programs([str(script), "0"], [str(script), "1"], env=env)
    assert (first, second) == (1, 1), err
    assert "int8, kernels: encode: 1 of " in out
    assert "int8, mean: bucket 0: " in out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("int8 ")] == [["int8", "WRONG", "WRONG"]]
    assert nothing == ""
    assert "the results above are not all right" in err


def test_a_row_lists_what_is_wrong():
    assert Row("int8", kernels=["a"], mean=[], training=["b"]).failures() == ["int8, kernels: a", "int8, training: b"]


def _with_a_kernel_that_raises(rank, size):
    kernels.load().sign.encode_ = lambda *_: 1 / 0
    checking.WORKLOADS = {"cpu": (checking.SMALL, 1)}
    return checking.run(rank, size, {"device": "cpu", "hooks": ["sign", "exact"]}, lambda part, doing: None)


def test_a_kernel_that_raises_does_not_end_the_check():
    """A compiler's error, say. The other hooks are still checked."""
    result = spawn_ranks(2, _with_a_kernel_that_raises, timeout_s=500)[0]
    assert result["failures"] == [
        "sign, kernels: the kernels raise ZeroDivisionError: division by zero (rank 0, 1)",
    ]
    _, sign, exact = result["rows"]
    assert (sign["mean"], sign["training"], exact["mean"], exact["training"]) == (None, None, [], [])


def test_an_error_above_the_promised_one_is_named():
    inputs = torch.ones(2, 100, dtype=torch.float64)
    right, wrong = torch.ones(100), torch.full((100,), 1.5)
    assert checking._error(checking.exchange("int8"), inputs, right) == (0.0, "")
    error, text = checking._error(checking.exchange("int8"), inputs, wrong)
    assert error == 0.5
    assert text.startswith("the error 0.5 is above the promised 0.0")
