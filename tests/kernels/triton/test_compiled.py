"""What the kernels compile to, ahead of time and without a GPU, and what the docs say about it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "gpu_kernels.py"
PAGE = ROOT / "docs" / "gpu-kernels.md"
TARGETS = {"sm_80", "sm_90", "sm_100", "gfx942"}
CODECS = {"int8", "fp8", "sign", "topk", "int6", "int5", "int4", "int3", "int2", "bf16", "fp16"}

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def known():
    """Everything, from a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, "--json", "--jobs", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cases(known):
    return [(kernel, target, facts) for kernel, by in known["facts"].items() for target, facts in by.items()]


def test_every_kernel_compiles_for_every_target(known):
    assert {kernel.partition(" ")[0].partition(":")[0] for kernel in known["facts"]} == CODECS
    for codec in CODECS:
        assert {f"{codec} reduce", f"{codec} reduce with feedback", f"{codec} total"} <= known["facts"].keys()
    assert all(by.keys() == TARGETS for by in known["facts"].values())


def test_no_register_is_spilled(known):
    assert [case for case in cases(known) if case[2]["spilled_bytes"]] == []


def test_no_multiply_add_is_contracted(known):
    """It rounds once where the other kernels round twice."""
    assert [case for case in cases(known) if case[2]["contracted"]] == []


def test_values_are_loaded_and_stored_as_vectors(known):
    """16 bytes at a time, where the kernel loads or stores values of 4 bytes. The codes of int8 and fp8 go by fours."""
    for kernel, target, facts in cases(known):
        if kernel.endswith(("of bf16", "of fp16", "half_scale")):
            continue
        if " total" not in kernel:
            assert facts["vector_loads"], (kernel, target)
        if " total" in kernel or "feedback" in kernel:
            assert facts["vector_stores"], (kernel, target)
        if kernel.startswith(("int8", "fp8")):
            assert not facts["byte_stores"], (kernel, target)


def test_little_more_moves_than_must(known):
    assert known["bytes"].keys() == CODECS
    for codec, found in known["bytes"].items():
        for operation, (counted, least) in found.items():
            assert least <= counted <= 1.05 * least, (codec, operation)


def test_the_docs_have_this_table(known):
    assert known["table"] in PAGE.read_text(), "run scripts/gpu_kernels.py --write"


def test_a_fused_multiply_add_would_be_seen():
    """The count looks at the right thing: with Triton's default there are multiply-adds."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import gpu_kernels as script\n"
        "print(*(script.compiled(script.Kernel('int4', 'total'), target, fused=True).contracted"
        " for target in ('sm_90', 'gfx942')))"
    )
    command = [sys.executable, "-c", code, SCRIPT.parent]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(int(count) > 0 for count in done.stdout.split())
