"""What the Triton kernels compile to, without a GPU: registers, shared memory, instructions, and bytes per value.

    python scripts/gpu_kernels.py            print the table of docs/gpu-kernels.md
    python scripts/gpu_kernels.py --write    put it there
    python scripts/gpu_kernels.py --json     everything that is known of each kernel and target

The kernels are compiled ahead of time for three NVIDIA targets and one AMD target, and the facts are read from the
compiled code. The bytes that a kernel loads and stores are counted while it runs in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradwire.codecs import CODECS
from gradwire.kernels.batch import Entry
from gradwire.spec import build
from gradwire.testing import interpreter

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gpu-kernels.md"
BEGIN, END = "<!-- begin of the table -->\n", "<!-- end of the table -->"
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SPECS = ("int8", "fp8", "sign", "topk", "int6", "int5", "int4", "int3", "int2", "bf16", "fp16")
VARIANTS = ("int8:rounding=stochastic", "int4:rounding=stochastic", "int4:hadamard=256", "int4:block=256")
RANKS = 4
"""Bytes are counted for messages of so many ranks."""
SAMPLE = 16384


class Kernel(NamedTuple):
    """A kernel as it is compiled for one codec."""

    spec: str
    name: str
    """Of a function in `gradwire.kernels.triton.passes`."""
    feedback: bool = False
    dtype: str = "fp32"

    def __str__(self) -> str:
        kind = "" if self.dtype == "fp32" else f" of {self.dtype}"
        return f"{self.spec} {self.name}{' with feedback' if self.feedback else ''}{kind}"


KERNELS = (
    *(
        Kernel(spec, name, feedback)
        for spec in SPECS
        for name, feedback in (("reduce", 0), ("reduce", 1), ("total", 0))
    ),
    *(Kernel(spec, name) for spec in VARIANTS for name in ("reduce", "total")),
    *(Kernel("int8", name, dtype=dtype) for dtype in ("bf16", "fp16") for name in ("reduce", "total")),
    Kernel("fp16", "tops"),
    Kernel("fp16", "tops", True),
    Kernel("fp16", "scaled"),
    Kernel("fp16", "half_scale"),
)


@dataclass(frozen=True)
class Facts:
    """What the compiled code of a kernel says."""

    registers: int
    """Per thread."""
    shared_bytes: int
    spilled_bytes: int
    vector_loads: int
    """Instructions that load 16 bytes."""
    vector_stores: int
    byte_stores: int
    """Instructions that store a single byte."""
    contracted: int
    """Multiply-adds with one rounding, other than those of a division or a square root."""


def coding_of(spec: str) -> Any:
    """The compile-time constant of a codec."""
    return _batch(build("codec", spec, CODECS)).coding


def _batch(codec: Any) -> Any:
    """`Codec.batch` as on a GPU."""
    with interpreter.on("cpu"):
        return codec.batch(torch.empty(1))


# -- compiling -------------------------------------------------------------------------------------------------------


def compiled(kernel: Kernel, target: str, fused: bool = False) -> Facts:
    """Compile a kernel as `gradwire.kernels.triton.launch` would on such a GPU, and read the result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gradwire.kernels.triton import passes

    function, coding = getattr(passes, kernel.name), coding_of(kernel.spec)
    constants = _constants(kernel, coding, function.arg_names)
    signature = {name: _type(name, kernel, constants) for name in function.arg_names}
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in pointers})
    options = {"num_warps": coding.warps, "enable_fp_fusion": fused}
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    return _amd_facts(made) if target.startswith("gfx") else _nvidia_facts(made)


def _constants(kernel: Kernel, coding: Any, names: list[str]) -> dict[str, Any]:
    values = {"C": coding, "TABLE": True, "KEEP": kernel.feedback, "ADD": False, "ALIGN": 8, "WIRE_ALIGN": 4}
    return {name: value for name, value in {**values, "OWN": True, "SIZE": 4096}.items() if name in names}


def _type(name: str, kernel: Kernel, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    pointers = {"values": f"*{kernel.dtype}", "own": f"*{kernel.dtype}", "rows": "*fp16", "largest": "*i32"}
    pointers |= {"wires": "*u8", "wire": "*u8", "table": "*i64"}
    pointers |= dict.fromkeys(("residual", "sums", "out", "factors", "scale"), "*fp32")
    numbers = {"alpha": "fp32", "size": "fp32", "seed": "i32"}
    return pointers.get(name) or numbers.get(name, "i64")


def _nvidia_facts(made: Any) -> Facts:
    usage, ptx = _resource_usage(made.asm["cubin"]), made.asm["ptx"]
    return Facts(
        registers=usage["REG"],
        shared_bytes=made.metadata.shared,
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        vector_loads=len(re.findall(r"ld\.global\.v4\.b32", ptx)),
        vector_stores=len(re.findall(r"st\.global\.v4\.b32", ptx)),
        byte_stores=len(re.findall(r"st\.global\.b8", ptx)),
        contracted=len(re.findall(r"\bfma\.rn", ptx)),
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text.stdout)}


def _amd_facts(made: Any) -> Facts:
    asm = made.asm["amdgcn"]
    numbers = dict(
        re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", asm)
    )
    spilled = int(numbers["private_segment_fixed_size"])
    spilled += 4 * (int(numbers["vgpr_spill_count"]) + int(numbers["sgpr_spill_count"]))
    return Facts(
        registers=int(numbers["vgpr_count"]),
        shared_bytes=made.metadata.shared,
        spilled_bytes=spilled,
        vector_loads=len(re.findall(r"(?:buffer|global)_load_dwordx4", asm)),
        vector_stores=len(re.findall(r"(?:buffer|global)_store_dwordx4", asm)),
        byte_stores=len(re.findall(r"(?:buffer|global)_store_byte", asm)),
        contracted=len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac|fmamk|fmaak|mac|mad)_f32", asm))
        - _amd_own_multiply_adds(asm),
    )


def _amd_own_multiply_adds(asm: str) -> int:
    """Those that make up the divisions and square roots, which AMD has no instruction for: five and two each."""
    return 5 * len(re.findall(r"\bv_div_fmas_f32", asm)) + 2 * len(re.findall(r"\bv_sqrt_f32", asm))


def all_facts(jobs: int) -> Iterator[tuple[Kernel, str, Facts]]:
    """Every kernel on every target."""
    pairs = [(kernel, target) for kernel in KERNELS for target in TARGETS]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for pair, facts in zip(pairs, pool.map(compiled, *zip(*pairs, strict=True)), strict=True):
            yield *pair, facts


# -- counting bytes --------------------------------------------------------------------------------------------------


def traffic(spec: str) -> dict[str, tuple[float, float]]:
    """By operation: the bytes per value that the kernels load and store, and the least that any kernel must.

    Needs TRITON_INTERPRET=1. fp16 must know its scale first, so the least for it includes a second pass.
    """
    codec = build("codec", spec, CODECS)
    batch, flat, size = _batch(codec), torch.randn(SAMPLE), codec.wire_bytes(SAMPLE)
    entries, wires, counted = (
        (Entry(0, SAMPLE, 0, False),),
        torch.zeros((RANKS, size), dtype=torch.uint8),
        _count_bytes(),
    )
    for rank in range(RANKS):
        codec.encode(flat, out=wires[rank])
    wire, again = size / SAMPLE, 4.0 if spec == "fp16" else 0.0
    calls = {
        "encode": (lambda: batch.encode_(wires, flat, entries, None), 4 + wire + again),
        "encode, feedback": (lambda: batch.encode_(wires, flat, entries, flat.clone()), 8 + wire + again),
        "reduce": (lambda: batch.reduce_(wires, flat, entries, wires, 0, 0.25, None), 4 + RANKS * wire + 2 * again),
        "decode": (lambda: batch.total_(flat, entries, wires, 1.0, 1), 4 + wire),
        "sum": (lambda: batch.total_(flat, entries, wires, 0.25, RANKS), 4 + RANKS * wire),
    }
    found = {}
    for name, (call, least) in calls.items():
        counted.clear()
        assert call()
        found[name] = (sum(counted) / SAMPLE, least)
    return found


def _count_bytes() -> list[int]:
    """The bytes of every load and store that the interpreter does from now on."""
    from triton.runtime.interpreter import interpreter_builder as builder

    counted: list[int] = []

    def counting(function: Any, mask_at: int) -> Any:
        def call(pointers: Any, *others: Any) -> Any:
            size = pointers.get_element_ty().primitive_bitwidth // 8
            counted.append(int(others[mask_at].data.sum()) * size)
            return function(pointers, *others)

        return call

    builder.create_masked_load = counting(builder.create_masked_load, 0)
    builder.create_masked_store = counting(builder.create_masked_store, 1)
    return counted


def all_traffic() -> dict[str, dict[str, tuple[float, float]]]:
    """`traffic` of every codec, from a process with the interpreter."""
    command = [sys.executable, __file__, "--traffic"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


# -- the table -------------------------------------------------------------------------------------------------------


def table(facts: dict[str, dict[str, dict[str, int]]], bytes_of: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Two tables in Markdown: what moves, and what the compiler made."""
    operations = list(next(iter(bytes_of.values())))
    lines = [f"| Codec | {' | '.join(operations)} |", "|---" * (len(operations) + 1) + "|"]
    for spec, found in bytes_of.items():
        cells = [f"{counted:.2f} ({least:.2f})" for counted, least in found.values()]
        lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    lines += ["", f"| Kernel | {' | '.join(TARGETS)} |", "|---" * (len(TARGETS) + 1) + "|"]
    for kernel, by_target in facts.items():
        cells = [f"{one['registers']}, {one['shared_bytes']}" for one in by_target.values()]
        lines.append(f"| {kernel} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print, write, or give everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything that is known")
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu-kernels.md")
    parser.add_argument("--jobs", type=int, default=2, help="how many compilers run at a time")
    parser.add_argument("--traffic", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.traffic:
        interpreter.load()
        print(json.dumps({spec: traffic(spec) for spec in SPECS}))
        return
    facts: dict[str, dict[str, dict[str, int]]] = {}
    for kernel, target, one in all_facts(given.jobs):
        facts.setdefault(str(kernel), {})[target] = asdict(one)
    bytes_of = all_traffic()
    text = table(facts, bytes_of)
    if given.json:
        print(json.dumps({"facts": facts, "bytes": bytes_of, "table": text}))
    elif given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    else:
        print(text)


if __name__ == "__main__":
    main()
